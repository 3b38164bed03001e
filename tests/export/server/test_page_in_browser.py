"""The page at `/`, used in a browser as a person would."""

import base64
import json
import re
import shutil
import subprocess
import sys

import pytest

from dsimg_export.serve import ServeConfig, open_server
from tests.export.golden_runs import edit_manifest, encoded_pictures, write_golden_run
from tests.export.server.live import serving

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright to look at the page in a browser"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

ACCURACY = {"images": 1000, "top1": {"value": 0.86, "interval": [0.837, 0.88]}}
# A refusal is an error in the browser's console; it is the page that has to say it well.
REFUSED = "Failed to load resource: "
# What a drop and a paste carry: one file, under a name that is no HTML.
FILE = """data => {
    const carried = new DataTransfer();
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    carried.items.add(new File([bytes], "<b>one</b>.png", {type: "image/png"}));
    return carried;
}"""
# The elements whose text is too faint on what lies behind it, for WCAG's AA: (r, g, b) to the contrast.
FAINT = """() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => numbers(colour).slice(0, 3).map((value) => value / 255)
        .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
    const behind = (element) => {
        const colour = getComputedStyle(element).backgroundColor;
        return numbers(colour)[3] === 0 ? behind(element.parentElement) : colour;
    };
    const ownText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    return [...document.body.querySelectorAll("*")].filter((element) => element.checkVisibility() && ownText(element))
        .map((element) => {
            const [low, high] = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => a - b);
            return [element.textContent, (high + 0.05) / (low + 0.05)];
        })
        .filter(([, contrast]) => contrast < 4.5);
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as found:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        try:
            browser = found.chromium.launch(executable_path=path, args=["--disable-gpu"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium, neither as one of {', '.join(BROWSERS)} nor playwright's own: {error}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    first = write_golden_run(folder / "digits")
    second = write_golden_run(folder / "small", parents=(first,))
    edit_manifest(second.path, lambda content: content.update(metrics={"validation": ACCURACY}, stage="quantize"))
    return first, second


@pytest.fixture(scope="module")
def live(runs):
    with serving(*(run.path for run in runs)) as found:
        yield found


@pytest.fixture
def files(tmp_path):
    """Return a PNG, a JPEG, and what is no picture."""
    paths = [tmp_path / "a.png", tmp_path / "b.jpg", tmp_path / "c.jpg"]
    for path, data in zip(paths, [*encoded_pictures()[:2], b"no image"], strict=True):
        path.write_bytes(data)
    return paths


@pytest.fixture
def visit(browser):
    """Open a server's page; at the end of the test there has to be no error in its console, but for refusals."""
    contexts, errors = [], []

    def opened(live, path="", **context):
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{live.port}/{path}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [error for error in errors if not error.startswith(REFUSED)] == []


def answers(page, count):
    """Return the answers, once there are so many."""
    found = page.locator("article[aria-busy=false]")
    playwright.expect(found).to_have_count(count)
    return found.all()


def expected(live, data, top=5, model="digits"):
    """Return the lines that a picture is to be shown with."""
    classes = live.post(f"/models/{model}/predict?top={top}", data).json["images"][0]["classes"]
    return [f"{one['class']} {one['probability']:.1%}" for one in classes]


def lines(answer):
    return [" ".join(line.split()) for line in answer.locator(".best li").all_inner_texts()]


def test_pictures_are_picked_and_answered_and_a_bad_one_says_why(live, visit, files):
    page = visit(live)
    page.get_by_label("Choose pictures").set_input_files(files)
    first, second, third = answers(page, 3)
    assert first.get_by_role("heading").inner_text() == "a.png"
    assert first.locator(".about").inner_text().startswith("40 × 24, ")
    assert lines(first) == expected(live, encoded_pictures()[0])
    assert lines(second) == expected(live, encoded_pictures()[1])
    widths = [float(found.evaluate("bar => parseFloat(bar.style.width)")) for found in first.locator(".bar i").all()]
    assert widths == sorted(widths, reverse=True)
    assert sum(widths) == pytest.approx(100, abs=0.01)
    reason = live.post("/predict", b"no image").json["error"]
    assert third.locator(".error").inner_text().lower().startswith(reason.lower())
    assert third.locator(".best").is_hidden()
    assert third.locator(".preview").inner_text() == "no preview"
    stages = [line.split()[0] for line in first.locator(".timing li").all_inner_texts()]
    assert stages == ["receive", "wait", "decode", "network"]
    assert re.fullmatch(
        r"[\d.]+ ms on the server(, in a batch of 2)?; [\d.,]+ ms from here and back",
        first.locator(".timing p").inner_text(),
    )
    spoken = page.get_by_role("log").inner_text()
    assert f"a.png: {', '.join(lines(first)[0].split())}" in spoken
    assert "c.jpg: " in spoken


def test_a_picture_may_be_dropped_or_pasted_and_its_name_is_text(live, visit):
    page = visit(live)
    data = encoded_pictures()[0]
    carried = page.evaluate_handle(FILE, base64.b64encode(data).decode())
    page.dispatch_event("body", "drop", {"dataTransfer": carried})
    (dropped,) = answers(page, 1)
    assert dropped.get_by_role("heading").inner_text() == "<b>one</b>.png"
    page.evaluate(
        "data => document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true}))", carried
    )
    assert [lines(one) for one in answers(page, 2)] == [expected(live, data)] * 2
    assert page.locator("article b").count() == 0
    page.dispatch_event("body", "drop", {"dataTransfer": page.evaluate_handle("() => new DataTransfer()")})
    assert "There is no file in it" in page.get_by_role("status").inner_text()


def test_another_model_and_another_number_of_classes_ask_again(live, visit, files):
    page = visit(live)
    assert page.get_by_label("Best classes").locator("option").all_inner_texts() == ["1", "3", "5"]
    page.get_by_label("Choose pictures").set_input_files(files[0])
    answers(page, 1)
    with page.expect_response("**/models/digits/predict?top=3"):
        page.get_by_label("Best classes").select_option("3")
    playwright.expect(page.locator(".best li")).to_have_count(3)
    with page.expect_response("**/models/small/predict?top=3"):
        page.get_by_role("combobox", name="Model").select_option("small")
    (answer,) = answers(page, 1)
    assert lines(answer) == expected(live, encoded_pictures()[0], top=3, model="small")
    page.get_by_role("button", name="Clear").click()
    assert page.locator("article").count() == 0
    assert page.locator("#answers").is_hidden()


def test_the_card_tells_what_the_model_is_and_how_it_was_made(live, visit):
    page = visit(live)
    page.get_by_role("combobox", name="Model").select_option("small")
    model = live.server.models["small"]
    terms = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True))
    size = model.served.run.file("model").stat().st_size
    assert {name: " ".join(text.split()) for name, text in terms.items()} == {
        "name": "small",
        "version": model.version,
        "network": "tests.net",
        "classes": "5",
        "Top-1": "86.00% 95 % interval 83.70% to 88.00%, 1,000 pictures",
        "latency": "not measured",
        "file": f"{size / 1024:.1f} KiB",
        "input": "16 × 16 pixels",
        "runs on": "ONNX Runtime, cpu",
    }
    steps = [" ".join(text.split()) for text in page.locator("#steps li").all_inner_texts()]
    created = [step["created"][:10] for step in live.get("/models").json["models"][1]["steps"]]
    assert steps == [
        f"quantize small tests.net, Top-1 86.00%, {created[0]}",
        f"export digits tests.net, {created[1]}",
    ]
    page.get_by_text("Its classes").click()
    assert page.locator("#classes").inner_text() == "ant, bee, fly, moth, wasp"
    page.get_by_role("combobox", name="Model").select_option("digits")
    assert "not measured" in page.locator("dd").all_inner_texts()[4]


def test_a_key_is_asked_for_kept_in_memory_and_used(runs, visit, files):
    with serving(runs[0].path, keys=(b"sesame",)) as live:
        page = visit(live)
        field = page.get_by_label("API key")
        playwright.expect(field).to_be_focused()
        page.get_by_label("Choose pictures").set_input_files(files[0])
        for wrong in ("second", "schlüssel€"):
            field.fill(wrong)
            field.press("Enter")
            playwright.expect(page.get_by_role("alert")).to_have_text("The server does not take this key.")
        field.fill(" sesame ")
        field.press("Enter")
        assert lines(answers(page, 1)[0])
        assert field.is_hidden()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert "-H 'X-API-Key: KEY'" in page.locator("#curl").inner_text()
        assert "sesame" not in page.content()
        live.server.keys = (b"third",)
        page.get_by_label("Best classes").select_option("3")
        field.fill("third")
        field.press("Enter")
        playwright.expect(page.locator(".best li")).to_have_count(3)
        page.reload()
        playwright.expect(field).to_be_visible()


@pytest.mark.parametrize("locked", [False, True])
def test_the_programs_that_it_shows_run(runs, visit, tmp_path, locked):
    (tmp_path / "photo.jpg").write_bytes(encoded_pictures()[1])
    with serving(*(run.path for run in runs), keys=(b"sesame",) if locked else ()) as live:
        page = visit(live)
        if locked:
            page.get_by_label("API key").fill("sesame")
            page.get_by_label("API key").press("Enter")
        page.get_by_role("combobox", name="Model").select_option("small")
        page.get_by_label("Best classes").select_option("3")
        shown = {name: page.locator(f"#{name}").text_content() for name in ("curl", "requests", "tritonclient")}
        best = live.post("/predict?top=3", encoded_pictures()[1], x_api_key="sesame").json["images"][0]["classes"]
        programs = {"tritonclient": [sys.executable, "-c"]}
        if shutil.which("curl"):
            programs["curl"] = ["sh", "-c"]
        if subprocess.run([sys.executable, "-c", "import requests"], capture_output=True).returncode == 0:
            programs["requests"] = [sys.executable, "-c"]
        said = {}
        for name, command in programs.items():
            text = shown[name].replace("KEY", "sesame")
            done = subprocess.run([*command, text], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            said[name] = done.stdout
    assert [line.split(":")[2] for line in said["tritonclient"].splitlines()] == [one["class"] for one in best]
    if "curl" in said:
        assert json.loads(said["curl"])["model"] == "small"
        assert len(json.loads(said["curl"])["images"][0]["classes"]) == 3
    if "requests" in said:
        assert said["requests"] == "".join(f"{one['probability']:.1%}  {one['class']}\n" for one in best)


def test_a_server_that_refuses_or_is_gone_is_said_and_may_be_asked_again(runs, visit, files):
    with serving(runs[0].path) as live:
        page = visit(live)
        playwright.expect(page.locator("#card")).to_be_visible()
        page.route("**/predict?*", lambda route: route.fulfill(status=502, body="<b>proxy</b>"))
        page.get_by_label("Choose pictures").set_input_files(files[0])
        (answer,) = answers(page, 1)
        assert answer.locator(".error").inner_text() == "The server said 502 and nothing more."
        page.unroute("**/predict?*")
        page.route("**/predict?*", lambda route: route.abort())
        answer.get_by_role("button", name="Ask again").click()
        playwright.expect(answer.locator(".error")).to_contain_text("No answer came")
        page.unroute("**/predict?*")
        answer.get_by_role("button", name="Ask again").click()
        playwright.expect(answer.locator(".best li")).to_have_count(5)
        assert answer.locator(".error").is_hidden()
        assert answer.get_by_role("button", name="Ask again").is_hidden()


def test_a_model_that_is_made_anew_shows_its_new_card(runs, visit, files, tmp_path):
    fresh = write_golden_run(tmp_path / "digits", parents=(runs[1],))
    with serving(runs[0].path) as live:
        page = visit(live)
        playwright.expect(page.locator("#facts")).to_contain_text(live.server.models["digits"].version)
        live.server.models.update(open_server(ServeConfig(source=(fresh.path,))).models)
        page.get_by_label("Choose pictures").set_input_files(files[0])
        playwright.expect(page.locator("#facts")).to_contain_text(live.server.models["digits"].version)
        assert lines(answers(page, 1)[0])


def test_it_is_used_by_keyboard_alone(live, visit, files):
    page = visit(live)
    playwright.expect(page.locator("#card")).to_be_visible()
    page.keyboard.press("Tab")
    playwright.expect(page.get_by_role("combobox", name="Model")).to_be_focused()
    page.keyboard.press("Tab")
    playwright.expect(page.get_by_label("Best classes")).to_be_focused()
    page.keyboard.press("Tab")
    playwright.expect(page.get_by_label("Choose pictures")).to_be_focused()
    assert page.locator(".drop").evaluate("drop => getComputedStyle(drop).outlineStyle") == "solid"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(files[0])
    answers(page, 1)
    page.keyboard.press("Tab")
    playwright.expect(page.get_by_role("button", name="Clear")).to_be_focused()
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_label("Choose pictures")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["", "docs"])
def test_its_text_can_be_read_on_what_is_behind_it(live, visit, files, scheme, path):
    page = visit(live, path, color_scheme=scheme, reduced_motion="reduce")
    if not path:
        page.get_by_label("Choose pictures").set_input_files(files)
        answers(page, 3)
    page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    assert page.evaluate(FAINT) == []


@pytest.mark.parametrize("width", [320, 390, 1240])
@pytest.mark.parametrize("path", ["", "docs"])
def test_it_fits_a_phone(live, visit, files, width, path):
    page = visit(live, path, viewport={"width": width, "height": 800})
    if not path:
        page.get_by_label("Choose pictures").set_input_files(files)
        answers(page, 3)
    page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_nothing_moves_where_that_is_not_wanted(live, visit, files):
    page = visit(live, reduced_motion="reduce")
    page.get_by_label("Choose pictures").set_input_files(files[0])
    answers(page, 1)
    assert page.evaluate("document.getAnimations().length") == 0
