// Sends pictures to the server that this page came from, and shows what it says of them. Nothing is stored.

const AT_A_TIME = 4; // requests, so that many pictures neither fill the server's queue nor wait for one another
const STAGES = { read: "receive", decode: "decode", queue: "wait", infer: "network" };

const at = (id) => document.getElementById(id);
let models = []; // the cards of GET /models
let key = null; // the API's, in this variable only
let answers = []; // {file, url, view, stop}, as they are shown
let waiting = []; // those that are still to be asked
let running = 0;

// Asking

async function load() {
  let response, said;
  try {
    response = await fetch("models", { headers: headers() });
    said = await response.json();
  } catch {
    return note("The server does not answer. Load this page again.");
  }
  if (response.status === 401) return wantKey();
  if (!response.ok) return note(sentence(said.error));
  models = said.models;
  note("");
  at("key-form").hidden = true;
  at("key").value = "";
  fill(at("model"), models.map((model) => model.name), models[0].name);
  at("model-choice").hidden = models.length < 2;
  showModel();
  next();
}

function add(files) {
  if (!files.length) return note("There is no file in it. Save the picture first, then choose it.");
  note("");
  const added = [...files].map(newAnswer);
  at("list").prepend(...added.map((answer) => answer.view));
  at("answers").hidden = false;
  answers = [...added, ...answers];
  enqueue(added);
}

function enqueue(some) {
  for (const answer of some) {
    answer.stop?.abort();
    answer.view.setAttribute("aria-busy", "true");
    if (!waiting.includes(answer)) waiting.push(answer);
  }
  next();
}

async function next() {
  if (!models.length || !at("key-form").hidden || running >= AT_A_TIME || !waiting.length) return;
  const answer = waiting.shift();
  running++;
  next();
  try {
    await ask(answer);
  } finally {
    running--;
    next();
  }
}

async function ask(answer) {
  const { signal } = (answer.stop = new AbortController());
  const model = chosen();
  const began = performance.now();
  let response, said;
  try {
    response = await fetch(`${route(model)}?top=${at("top").value}`, {
      method: "POST",
      body: answer.file,
      headers: { ...headers(), "content-type": "application/octet-stream" }, // the bytes decide, not the file's name
      signal,
    });
    said = await response.json();
  } catch (error) {
    if (signal.aborted) return;
    if (!response) said = { error: "No answer came: the server is gone, or took no picture of this size." };
    else said = { error: `The server said ${response.status} and nothing more.` };
  }
  if (signal.aborted) return;
  if (response?.status === 401) {
    waiting.unshift(answer);
    return wantKey();
  }
  if (said.version && said.version !== model.version) load(); // it was made anew since
  const timing = parseTiming(response?.headers.get("server-timing") ?? "");
  showAnswer(answer, said, { timing, ms: performance.now() - began, again: ![400, 413].includes(response?.status) });
}

const headers = () => (key === null ? {} : { "x-api-key": key });
const chosen = () => models.find((model) => model.name === at("model").value) ?? models[0];
const route = (model) => (models.length > 1 ? `models/${inUrl(model.name)}/predict` : "predict");
const inUrl = (name) => encodeURIComponent(name).replaceAll("'", "%27");

function wantKey() {
  at("key-said").textContent = key === null ? "" : "The server does not take this key.";
  key = null;
  at("key-form").hidden = false;
  at("key").focus();
}

// `read;dur=0.07, infer;dur=0.8, batch;desc="2"` -> {stages: [["read", 0.07], ["infer", 0.8]], batch: 2}
function parseTiming(text) {
  const stages = [...text.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, ms]) => [name, Number(ms)]);
  return { stages, batch: Number(text.match(/batch;desc="(\d+)"/)?.[1] ?? 0) };
}

// Showing: what the server or a file says is text, never HTML

function newAnswer(file) {
  const view = at("answer").content.firstElementChild.cloneNode(true);
  const answer = { file, view, url: URL.createObjectURL(file), stop: null };
  const image = view.querySelector("img");
  const about = view.querySelector(".about");
  view.querySelector("h3").textContent = file.name;
  about.textContent = bytesText(file.size);
  image.onload = () => {
    image.classList.toggle("small", image.naturalWidth < 100);
    about.textContent = `${image.naturalWidth} × ${image.naturalHeight}, ${bytesText(file.size)}`;
  };
  image.onerror = () => image.replaceWith("no preview");
  image.src = answer.url;
  view.querySelector(".again").onclick = () => enqueue([answer]);
  return answer;
}

function showAnswer({ file, view }, said, { timing, ms, again }) {
  const image = said.images?.[0];
  const reason = file.size ? (image?.error ?? said.error ?? "the server gave no reason") : "this file is empty";
  const error = image?.classes ? null : sentence(reason);
  const part = (selector) => view.querySelector(selector);
  view.setAttribute("aria-busy", "false");
  part(".state").hidden = true;
  part(".error").hidden = error === null;
  part(".best").hidden = error !== null;
  part(".again").hidden = error === null || !again;
  part(".timing").hidden = !timing.stages.length;
  if (error !== null) {
    part(".error").textContent = error;
    tell(`${file.name}: ${error}`);
  } else {
    part(".best").replaceChildren(...image.classes.map(classRow));
    tell(`${file.name}: ${image.classes[0].class}, ${percent(image.classes[0].probability)}`);
  }
  showTiming(part(".timing"), timing, ms);
}

function classRow({ class: name, probability }) {
  const bar = node("div", "", "bar");
  const inner = node("i");
  inner.style.width = `${100 * probability}%`;
  bar.append(inner);
  bar.setAttribute("aria-hidden", "true");
  return node("li", [node("span", name), node("span", percent(probability)), bar]);
}

function showTiming(view, { stages, batch }, ms) {
  const sum = stages.reduce((total, [, value]) => total + value, 0);
  const parts = stages.map(([name, value]) => {
    const part = node("i", "", name);
    part.style.width = `${(100 * value) / sum}%`;
    return part;
  });
  view.querySelector(".stack").replaceChildren(...parts);
  const numbers = stages.map(([name, value]) => node("li", `${STAGES[name] ?? name} ${msText(value)}`, name));
  view.querySelector("ul").replaceChildren(...numbers);
  const company = batch > 1 ? `, in a batch of ${batch}` : "";
  view.querySelector("p").textContent = `${msText(sum)} on the server${company}; ${msText(ms)} from here and back`;
}

function showModel() {
  const model = chosen();
  const counts = new Set([...[1, 3, 5, 10, 20].filter((n) => n <= model.classes.length), Math.min(20, model.classes.length)]);
  fill(at("top"), [...counts], Math.min(5, model.classes.length));
  at("facts").replaceChildren(...facts(model).flatMap(([name, ...said]) => [node("dt", name), node("dd", said)]));
  at("classes").textContent = model.classes.join(", ");
  at("steps").replaceChildren(...model.steps.flatMap(stepRows));
  showProgram();
  for (const id of ["choices", "card", "program"]) at(id).hidden = false;
}

function facts(model) {
  const [served] = model.steps;
  const [, height, width] = model.preprocess.input_size;
  const measured = model.steps.find((step) => Object.keys(step.accuracy).length);
  const accuracy = Object.entries(measured?.accuracy ?? {}).map(([name, { top1, images }]) => [
    "Top-1",
    `${share(top1.value)} `,
    small(`95 % interval ${share(top1.interval[0])} to ${share(top1.interval[1])}, ${number(images)} pictures`),
    name === "validation" ? "" : small(name),
    measured === served ? "" : small(`measured before, as ${measured.path}`),
  ]);
  const latency = Object.entries(served.latency).map(([name, seconds]) => [
    "latency",
    `${msText(1000 * seconds)} `,
    small(`${name}, on the machine where it was measured`),
  ]);
  return [
    ["name", ...breakable(model.name)],
    ["version", model.version],
    ["network", ...breakable(served.arch + (served.pruned ? ", pruned" : ""))],
    ["classes", number(model.classes.length)],
    ...(accuracy.length ? accuracy : [["Top-1", "not measured"]]),
    ...(latency.length ? latency : [["latency", "not measured"]]),
    ["file", bytesText(served.bytes[model.file])],
    ["input", `${width} × ${height} pixels`],
    ["runs on", `ONNX Runtime, ${model.provider}`],
  ];
}

function stepRows(step) {
  const top1 = step.accuracy.validation?.top1.value;
  const about = [
    step.parameters ? `${countText(step.parameters)} parameters` : "",
    top1 === undefined ? "" : `Top-1 ${share(top1)}`,
    step.created.slice(0, 10),
  ];
  const rest = about.filter(Boolean).flatMap((text) => [", ", node("span", text, "whole")]);
  const row = node("li", [node("b", step.stage), " ", ...breakable(step.path)]);
  row.append(small([...breakable(step.arch + (step.pruned ? ", pruned" : "")), ...rest]));
  if (step.begun_from) row.append(small(["begun from ", ...breakable(step.begun_from)]));
  if (!step.data) return [row];
  const { folder, train, val, classes } = step.data;
  const pictures = `${number(train)} training and ${number(val)} validation pictures, ${number(classes)} classes`;
  return [row, node("li", [node("b", "pictures"), " ", ...breakable(folder), small(pictures)])];
}

function showProgram() {
  const model = chosen();
  const base = new URL(".", location.href);
  const url = `${base}${route(model)}`;
  const asked = at("top").value;
  const locked = key !== null;
  at("curl").textContent = `curl --data-binary @photo.jpg${locked ? " -H 'X-API-Key: KEY'" : ""} '${url}?top=${asked}'`;
  at("requests").textContent = `import requests

with open("photo.jpg", "rb") as photo:
    answer = requests.post(
        "${url}",
        params={"top": ${asked}},${locked ? '\n        headers={"X-API-Key": "KEY"},' : ""}
        data=photo,
        timeout=10,
    )
answer.raise_for_status()
for one in answer.json()["images"][0]["classes"]:
    print(f"{one['probability']:.1%}  {one['class']}")`;
  const secure = base.protocol === "https:" ? ", ssl=True" : "";
  at("tritonclient").textContent = `import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient("${base.host}"${secure})
with open("photo.jpg", "rb") as photo:
    data = np.array([photo.read()], dtype=object)
images = triton.InferInput("images", [1], "BYTES")
images.set_data_from_numpy(data)
best = triton.InferRequestedOutput("logits", class_count=${asked})
answer = client.infer(
    ${JSON.stringify(model.name)},
    [images],
    outputs=[best],${locked ? '\n    headers={"X-API-Key": "KEY"},' : ""}
)
for line in answer.as_numpy("logits")[0]:
    print(line.decode())  # logit:index:class`;
}

function fill(select, values, otherwise) {
  const before = select.value;
  select.replaceChildren(...values.map((value) => new Option(value, value)));
  select.value = values.map(String).includes(before) ? before : otherwise;
}

function node(tag, content = "", className = "") {
  const made = document.createElement(tag);
  made.append(...[content].flat());
  if (className) made.className = className;
  return made;
}

const small = (content) => node("small", content);
const breakable = (name) => name.split(/(?<=[_:/.])/).flatMap((part) => [part, node("wbr")]);
const note = (text) => void (at("notice").textContent = text);

function tell(text) {
  at("log").append(node("p", text));
  if (at("log").children.length > 20) at("log").firstElementChild.remove();
}

// Numbers, as dsimg's terminal writes them

const number = (value) => value.toLocaleString("en");
const share = (value) => `${(100 * value).toFixed(2)}%`;
const msText = (ms) => `${ms < 999.5 ? Number(ms.toPrecision(3)) : number(Math.round(ms))} ms`;
const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

function percent(value) {
  if (value < 0.001) return "< 0.1%";
  return value > 0.9994 ? "> 99.9%" : `${(100 * value).toFixed(1)}%`;
}

function bytesText(count) {
  if (count < 1024) return `${count} B`;
  const power = Math.min(3, Math.floor(Math.log2(count) / 10));
  return `${(count / 1024 ** power).toFixed(1)} ${["", "KiB", "MiB", "GiB"][power]}`;
}

function countText(count) {
  const [limit, unit] = [[1e9, " G"], [1e6, " M"], [1e3, " k"], [1, ""]].find(([limit]) => count >= limit / 10);
  return (count / limit).toFixed(unit ? 2 : 0) + unit;
}

// What a person does

at("files").onchange = (event) => {
  add(event.target.files);
  event.target.value = ""; // the same picture may be chosen again
};
at("model").onchange = () => {
  showModel();
  enqueue(answers);
};
at("top").onchange = () => {
  showProgram();
  enqueue(answers);
};
at("clear").onclick = () => {
  for (const { stop, url } of answers) {
    stop?.abort();
    URL.revokeObjectURL(url);
  }
  answers = [];
  waiting = [];
  at("list").replaceChildren();
  at("answers").hidden = true;
  at("files").focus();
};
at("key-form").onsubmit = (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  if (/^[\x20-\x7e]+$/.test(key)) load();
  else wantKey(); // HTTP has no header for it
};

const hasFiles = (event) => event.dataTransfer.types.includes("Files");
addEventListener("dragover", (event) => {
  event.preventDefault(); // else the browser would open the picture in place of this page
  document.body.classList.toggle("dropping", hasFiles(event));
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  add(event.dataTransfer.files);
});
addEventListener("paste", (event) => {
  if (event.target === at("key")) return;
  event.preventDefault();
  add(event.clipboardData.files);
});

if (navigator.clipboard) {
  for (const pre of document.querySelectorAll("pre")) {
    const copy = node("button", "Copy", "quiet");
    copy.onclick = async () => {
      await navigator.clipboard.writeText(pre.textContent);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 2000);
    };
    pre.before(copy);
  }
}

load();
