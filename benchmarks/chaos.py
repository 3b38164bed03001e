"""Kill a training run anywhere, start it anywhere, get the same run: proof on two ranks, and the count of it.

    python benchmarks/chaos.py [--kills 100] [--stages 1 2 3]     kills; about a quarter of a minute each
    python benchmarks/chaos.py --damage                           checkpoints that were damaged on disk
    python benchmarks/chaos.py --leaving                          ranks that are asked to stop, die, or hang

For each ZeRO stage one run is trained undisturbed. Others are given by the same command, killed, given again, until
they are done: then weights, evaluation, predictions and every step's loss must be equal to the bit. Killed are one
rank, all ranks or a launcher at a random time, and one rank at each of the file events of a save (chaos_rank.py).
After each kill the ranks that are left must go by themselves, and a check that shares no code with dsimg finds the
newest whole checkpoint, which the next start must not fall behind. The exit code is 1 unless all passed.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dsimg.digits import write_digits

ROOT = Path(__file__).resolve().parents[1]
RANK_PROGRAM = ROOT / "benchmarks" / "chaos_rank.py"
SIZE = 2
PATIENCE = 180.0  # seconds for anything that must happen; a start takes about ten
GRACE = 30.0  # seconds for the ranks that are left to go by themselves
RANDOM_SECONDS = 4.0  # training is killed within so many seconds after its first step
RANK_TIMEOUT = 10  # seconds, where a rank hangs


# Starting and ending


@dataclass
class Start:
    """One giving of the command: its processes, what they print, and the events that its ranks log."""

    token: str
    processes: list["subprocess.Popen[bytes]"]  # the ranks, or their launcher
    outputs: list[Path]
    events: Path
    begun: float = field(default_factory=time.time)

    def text(self) -> str:
        """Return what the ranks have printed."""
        return "".join(path.read_text(errors="replace") for path in self.outputs)

    def codes(self) -> list[int | None]:
        """Return the exit codes; None for a process that runs."""
        return [process.poll() for process in self.processes]

    def living(self) -> list[int]:
        """Return the ids of all processes of this start, also of those whose parent has died."""
        mark = f"CHAOS_TOKEN={self.token}\0".encode()
        found = [process.pid for process in self.processes if process.poll() is None]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in found:
                try:
                    if mark in (entry / "environ").read_bytes() + b"\0":
                        found.append(int(entry.name))
                except OSError:
                    continue  # ended, or another user's
        return found

    def fired(self) -> dict[str, Any] | None:
        """Return the event at which a rank sent itself a signal, once it has."""
        return next((event for event in read_lines(self.events) if event.get("fired")), None)

    def wait_for_end(self) -> list[int | None]:
        """Wait until all are gone; return their exit codes, None for those that were not in time and are killed."""
        wait(lambda: not self.living(), seconds=PATIENCE)
        codes = self.codes()
        self.end()
        return codes

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.living():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait(PATIENCE)


class Starter:
    """Gives the commands of one proof, each with a number of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = itertools.count(1)
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def start(
        self,
        flags: Sequence[str],
        *,
        out: Path,
        launcher: bool = False,
        point: str = "",
        ranks: str = "",
        sign: str = "",
    ) -> Start:
        """Start the ranks with these flags; those in `ranks` send themselves the signal `sign` at `point`."""
        number = next(self._number)
        name = f"{out.name}_{number:04d}"
        token = f"{os.getpid()}-{number}"
        events = self.folder / "logs" / f"{name}_events.jsonl"
        port = str(free_port())
        environment = {
            **os.environ,
            "CHAOS_TOKEN": token,
            "CHAOS_POINT": point,
            "CHAOS_RANKS": ranks,
            "CHAOS_SIGNAL": sign,
            "CHAOS_RUN": str(out),
            "CHAOS_LOG": str(events),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
        }
        words = [str(RANK_PROGRAM), *flags, "--out", str(out)]
        commands: list[tuple[list[str], dict[str, str]]] = []
        if launcher:
            deepspeed = [str(Path(sys.executable).with_name("deepspeed")), "--quiet", "--num_gpus", str(SIZE)]
            commands.append(([*deepspeed, "--master_port", port, *words], environment))
        for rank in range(0 if launcher else SIZE):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE)}
            mine |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            commands.append(([sys.executable, *words], environment | mine))
        started = Start(token, [], [], events)
        for index, (command, variables) in enumerate(commands):
            output = self.folder / "logs" / f"{name}_{'launcher' if launcher else f'rank_{index}'}.txt"
            with output.open("wb") as stream:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
                )
            started.processes.append(process)
            started.outputs.append(output)
        return started

    def finish(self, flags: Sequence[str], *, out: Path) -> tuple[Start, str | None]:
        """Start the ranks and wait until they are done; return what went wrong."""
        started = self.start(flags, out=out)
        codes = started.wait_for_end()
        return started, None if codes == [0] * SIZE else f"exit codes {codes}"


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait(condition: Callable[[], Any], *, seconds: float) -> float | None:
    """Wait until `condition()` is true; return the seconds that took, or None when it was not in time."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if condition():
            return time.monotonic() - begun
        time.sleep(0.03)
    return None


# What is on the disk, read with nothing of dsimg's


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return a JSON lines file's whole lines."""
    found = []
    for line in path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of a kind, train or validation, that a run's metrics.jsonl has."""
    return [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == kind]


def problem_of(checkpoint: Path) -> str | None:
    """Return why a checkpoint is not whole; None for one whose state and shards all have their recorded hashes."""
    try:
        state = json.loads((checkpoint / "state.json").read_bytes())
        recorded = state.pop("digest")
        if hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest() != recorded:
            return "state.json: digest"
        for shard in state["shards"]:
            if hashlib.sha256((checkpoint / shard["file"]).read_bytes()).hexdigest() != shard["sha256"]:
                return f"{shard['file']}: hash"
        if len(state["shards"]) != SIZE or checkpoint.name != f"step_{state['step']:08d}":
            return "state.json: shards or step"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def whole_checkpoints(run: Path) -> list[Path]:
    """Return a run's whole checkpoints, newest first."""
    found = sorted((run / "checkpoints").glob("step_*"), reverse=True)
    return [checkpoint for checkpoint in found if problem_of(checkpoint) is None]


def newest_step(run: Path) -> int:
    """Return the step of a run's newest whole checkpoint; 0 where there is none."""
    found = whole_checkpoints(run)
    return int(found[0].name.removeprefix("step_")) if found else 0


def resumed_step(text: str) -> int | None:
    """Return the step that a start says it resumes from; None where it does not say."""
    for line in text.splitlines():
        if "resum" in line and "step_" in line:
            return int(line.partition("step_")[2][:8])
    return None


def last_line(run: Path) -> tuple[int, int]:
    """Return the identity and the size of metrics.jsonl: another file after a resume, a larger one after a step."""
    try:
        found = (run / "metrics.jsonl").stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_size


def differences(run: Path, reference: Path) -> list[str]:
    """Return in what a finished run is not the reference, to the bit."""
    found = []
    for name in ("weights.safetensors", "evaluation.json", "predictions.csv"):
        if not (run / name).exists():
            found.append(f"{name} is missing")
        elif (run / name).read_bytes() != (reference / name).read_bytes():
            found.append(f"{name} differs")
    for kind, keys in (("train", ("loss", "lr", "grad_norm")), ("validation", ("top1", "loss"))):
        mine, theirs = lines_of(run, kind), lines_of(reference, kind)
        steps, expected = [line["step"] for line in mine], [line["step"] for line in theirs]
        if steps != expected:
            lost = sorted(set(expected) - set(steps))[:5]
            twice = sorted({step for step in steps if steps.count(step) > 1})[:5]
            found.append(f"metrics.jsonl: {kind} steps missing {lost}, twice {twice}, {len(steps)} of {len(expected)}")
        values = {line["step"]: line for line in theirs}
        for line in mine:
            differing = [key for key in keys if line["step"] in values and line[key] != values[line["step"]][key]]
            if differing:
                found.append(f"metrics.jsonl: first differs at {kind} step {line['step']} in {', '.join(differing)}")
                break
    return found


def not_synced(events: Path) -> list[str]:
    """Return the files that the ranks renamed, themselves or a folder above them, without having synced them.

    What a kill cannot show, since the kernel still has the data: a power cut would lose it.
    """
    found = []
    open_files: dict[str, bool] = {}  # path -> whether it was synced since it was opened for writing
    for event in read_lines(events):
        path = event["path"]
        if event["name"] in ("open", "save_file"):
            open_files[path] = False
        elif event["name"] == "fsync" and path in open_files:
            open_files[path] = True
        elif event["name"] == "os.rename":
            for name in [name for name in open_files if name == path or name.startswith(f"{path}/")]:
                if not open_files.pop(name):
                    found.append(name)
    return found


# Kills

# What is killed at a random time: after the first step, or while the ranks start.
TIMES = ("one rank", "all ranks", "launcher, runner.py", "one rank", "all ranks, starting", "launcher, launch.py")


@dataclass(frozen=True)
class Kill:
    """What is to be killed, and when."""

    kind: str  # a row of the table at the end
    rank: int = 0
    point: str = ""  # for chaos_rank.py; without one, `delay` seconds after the first step
    delay: float = 0.0


@dataclass
class Outcome:
    """What came of a kill."""

    kill: Kill
    what: str
    newest: int
    seconds: float | None
    codes: list[int | None]
    resumed: int | None = None
    problems: list[str] = field(default_factory=list)


def plan_kills(
    events: Path, *, stages: Sequence[int], kills: int, rng: random.Random
) -> tuple[dict[int, list[Kill]], str]:
    """Deal the kills out to the stages: half at the file events of a save that the reference run logged, a fifth
    at those of its other files, the rest at random times. Return them, and a line about the events."""
    most: dict[tuple[int, str], int] = defaultdict(int)
    run_events = 0
    for event in read_lines(events):
        if "save" in event:
            for key, number in (("save", event["number"]), ("torn", event["tear"])):
                most[event["rank"], key] = max(most[event["rank"], key], number)
        elif event["rank"] == 0:
            run_events = max(run_events, event["number"])
    file_kills: list[Kill] = []
    for rank, key in sorted(most):
        kind = "file event of a save" if key == "save" else "file of a save torn"
        # In the first save of a start, in its second one, or, with what was left by the last kill, from the start.
        saves = itertools.cycle((1, 2, 1, 0))
        file_kills += [
            Kill(kind, rank=rank, point=f"{key}:{save}:{number}")
            for number, save in zip(range(1, most[rank, key] + 1), saves, strict=False)
        ]
    rng.shuffle(file_kills)
    file_turn = itertools.cycle(file_kills)
    end_turn = itertools.cycle(rng.sample(range(1, run_events + 1), run_events))
    times = itertools.cycle(TIMES)
    plan: dict[int, list[Kill]] = {}
    for index, stage in enumerate(stages):
        share = kills // len(stages) + (index < kills % len(stages))
        for_files, for_end = round(0.5 * share), round(0.2 * share)
        chosen = list(itertools.islice(file_turn, for_files))
        for kind in itertools.islice(times, share - for_files - for_end):
            longest = 8.0 if kind == "all ranks, starting" else RANDOM_SECONDS
            chosen.append(Kill(kind, rank=rng.randrange(SIZE), delay=rng.uniform(0, longest)))
        rng.shuffle(chosen)
        # Last, since the run has to be at its end for most of them.
        ends = sorted(itertools.islice(end_turn, for_end))
        plan[stage] = chosen + [Kill("file event of the run", point=f"run:{number}") for number in ends]
    counts = ", ".join(f"rank {rank} {key} {number}" for (rank, key), number in sorted(most.items()))
    return plan, f"file events of one save: {counts}; of the run's other files: {run_events}"


def carry_out(starter: Starter, kill: Kill, flags: Sequence[str], *, run: Path) -> tuple[Start, Outcome | None]:
    """Start the run, kill it, and see what is left; no outcome when it was done before the kill came."""
    before = last_line(run)
    by_launcher = kill.kind.startswith("launcher")
    started = starter.start(flags, out=run, launcher=by_launcher, point=kill.point, ranks=str(kill.rank), sign="KILL")
    what, problems = kill.kind, []
    if kill.point:
        happened = wait(lambda: started.fired() or not started.living(), seconds=PATIENCE)
        event = started.fired()
        if event is not None:
            what = f"rank {kill.rank} at {kill.point}: {event['name']} {event['path']}"
    else:
        seen: list[tuple[int, int]] = []

        def training() -> bool:
            """Tell whether a step was logged: metrics.jsonl is another file than before, and has grown."""
            now = last_line(run)
            if now != before and now[0] != before[0] and (not seen or now != seen[-1]):
                seen.append(now)
            return len(seen) > 1 or not started.living()

        happened = 0.0 if "starting" in kill.kind else wait(training, seconds=PATIENCE)
        wait(lambda: not started.living(), seconds=kill.delay)
        victims = victims_of(kill, started)
        if victims:
            what = f"{kill.kind} ({kill.rank})" if kill.kind == "one rank" else kill.kind
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        event = {"victims": victims} if victims else None
    if event is None:
        ended = happened is not None
        codes = started.codes()
        started.end()
        if ended and codes == [0] * len(codes):
            return started, None
        problem = f"ended by itself, exit codes {codes}" if ended else f"nothing to kill within {PATIENCE:.0f} s"
        return started, Outcome(kill, what, newest_step(run), None, codes, problems=[problem])
    seconds = wait(lambda: not started.living(), seconds=GRACE)
    codes = started.codes()
    if seconds is None:
        problems.append(f"stayed: {len(started.living())} processes after {GRACE:.0f} s")
    if any(code not in (None, 0, 1, 75, -signal.SIGKILL, -signal.SIGTERM) for code in codes):
        problems.append("a rank that was left ended with an exit code other than 0, 1 and 75")
    started.end()
    return started, Outcome(kill, what, newest_step(run), seconds, codes, problems=problems)


def victims_of(kill: Kill, started: Start) -> list[int]:
    """Return the processes to kill, of those that live."""
    living = started.living()
    first = [process.pid for process in started.processes if process.pid in living]
    if kill.kind == "launcher, runner.py":  # what `deepspeed` runs
        return first
    if kill.kind == "launcher, launch.py":  # which that starts, and which starts the ranks
        return [pid for pid in living if "deepspeed.launcher.launch" in command_of(pid)]
    if kill.kind == "one rank":
        return [pid for pid in first if pid == started.processes[kill.rank].pid]
    return first


def command_of(pid: int) -> str:
    """Return a process's command line; nothing for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def disturbed(
    starter: Starter, plan: Sequence[Kill], flags: Sequence[str], *, stage: int, reference: Path
) -> Iterator[Outcome]:
    """Carry out all kills on as many runs as that takes, each run to its end; yield their outcomes when it is known."""
    queue = deque(plan)
    for chain in itertools.count(1):
        if not queue:
            return
        run = starter.folder / f"zero{stage}_chain_{chain}"
        outcomes: list[Outcome] = []
        waiting: list[Outcome] = []  # those whose next start has not said yet where it resumes
        begins: list[tuple[Path, int]] = []
        newest, by_themselves, finished = 0, 0, False
        while not finished:
            done_before = (run / "run.json").exists()
            outcome: Outcome | None = None
            if queue:
                started, outcome = carry_out(starter, queue[0], flags, run=run)
                end = None
            else:
                started, end = starter.finish(flags, out=run)
            text = started.text()
            resumed = newest if done_before else resumed_step(text)
            if resumed is None and newest == 0:
                resumed = 0
            if resumed is not None:
                begins.append((started.outputs[0], resumed))
                for older in waiting:
                    older.resumed = resumed
                    if resumed < older.newest:
                        older.problems.append(f"step {older.newest} was whole, the next start began at {resumed}")
                    say(older, stage=stage, chain=chain, number=outcomes.index(older) + 1)
                waiting = []
            if outcome is None:
                finished = True
                if end is not None:
                    by_themselves = 3
                    print(f"zero{stage} chain {chain}: the last start: {end}; see {started.outputs[0]}", flush=True)
                elif queue and not outcomes:
                    kill = queue.popleft()  # else it would train for ever
                    outcomes.append(Outcome(kill, kill.kind, newest, None, [], problems=["never came"]))
            else:
                queue.popleft()
                if outcome.newest < newest:
                    outcome.problems.append(f"step {newest} was whole before, step {outcome.newest} is the newest now")
                newest = outcome.newest
                outcomes.append(outcome)
                waiting.append(outcome)
                if outcome.seconds is None and any("by itself" in problem for problem in outcome.problems):
                    by_themselves += 1
                finished = by_themselves == 3
        different = ["the run could not be brought to its end"] if by_themselves == 3 else differences(run, reference)
        for older in waiting:
            older.problems.append("no later start said where it resumed")
            say(older, stage=stage, chain=chain, number=outcomes.index(older) + 1)
        verdict = "equal to the bit" if not different else f"DIFFERS: {'; '.join(different)}"
        print(f"zero{stage} chain {chain}: {len(outcomes)} kills, then done: {verdict}", flush=True)
        for line in different:
            if "first differs at train step" in line:
                step = int(line.partition("train step ")[2].split()[0])
                log, begin = [entry for entry in begins if entry[1] < step][-1]
                print(f"  that step was trained by the start that resumed from {begin}: {log}", flush=True)
        for outcome in outcomes:
            outcome.problems += [f"end: {line}" for line in different]
            yield outcome


def say(outcome: Outcome, *, stage: int, chain: int, number: int) -> None:
    """Print a kill's line."""
    gone = "" if outcome.seconds is None else f"others gone in {outcome.seconds:.1f} s, exit codes {outcome.codes}; "
    print(
        f"zero{stage} chain {chain} kill {number}: {outcome.what}: {gone}newest whole step {outcome.newest}, "
        f"resumed from {outcome.resumed}: {'; '.join(['FAIL', *outcome.problems]) if outcome.problems else 'ok'}",
        flush=True,
    )


# The three proofs


def prepare(folder: Path, stage: int, *, epochs: int, seed: int, rank_timeout: int = RANK_TIMEOUT) -> list[str]:
    """Write the data and the DeepSpeed JSON; return the flags of a run, but for --out."""
    data = write_digits(folder / "digits")
    ds_config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 5000,
            "allgather_bucket_size": 5000,
            "stage3_param_persistence_threshold": 100,
        },
    }
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps(ds_config, indent=1))
    values = {
        "deepspeed_config": path,
        "data": data,
        "model": "benchmarks.chaos_rank:ChaosNet",
        "optimizer": "adamw",
        "ema": 0.95,
        "batch_size": 64,
        "epochs": epochs,
        "log_steps": 1,
        "seed": seed,
        # Read from the files by a process per rank, so that there is one more to die with it.
        "cache": "none",
        "workers": 1,
        "save_minutes": 0.01,
        "rank_timeout": rank_timeout,
    }
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def train_reference(starter: Starter, flags: Sequence[str], name: str) -> tuple[Path, Start]:
    """Train a run that nothing disturbs."""
    run = starter.folder / name
    started, problem = starter.finish(flags, out=run)
    if problem is not None:
        raise SystemExit(f"the undisturbed run failed: {problem}\n{started.text()[-3000:]}")
    print(f"{name}: {len(lines_of(run, 'train'))} steps in {time.time() - started.begun:.0f} s", flush=True)
    return run, started


def prove_kills(folder: Path, *, kills: int, stages: Sequence[int], seed: int, epochs: int, jobs: int) -> bool:
    """Kill, and print the table; return whether all passed."""
    begun = time.time()
    starter = Starter(folder)
    flags = {stage: prepare(folder, stage, epochs=epochs, seed=seed, rank_timeout=20) for stage in stages}
    results: dict[str, list[bool]] = defaultdict(list)
    with ThreadPoolExecutor(jobs) as pool:
        names = [f"zero{stage}_reference" for stage in stages]
        references = list(pool.map(partial(train_reference, starter), [flags[stage] for stage in stages], names))
        plan, line = plan_kills(references[0][1].events, stages=stages, kills=kills, rng=random.Random(seed))
        print(line, flush=True)
        unsynced = {name for _, started in references for name in not_synced(started.events)}

        def disturb(stage: int, reference: Path) -> list[Outcome]:
            return list(disturbed(starter, plan[stage], flags[stage], stage=stage, reference=reference))

        for stage, outcomes in zip(stages, pool.map(disturb, stages, [run for run, _ in references]), strict=True):
            for outcome in outcomes:
                results[outcome.kill.kind].append(not outcome.problems)
                results[f"ZeRO {stage}"].append(not outcome.problems)
    print(f"\n{'kind':<24} {'kills':>6} {'ok':>6}")
    for kind, passed in sorted(results.items()):
        print(f"{kind:<24} {len(passed):>6} {sum(passed):>6}")
    if unsynced:
        print(f"renamed without a sync: {sorted(unsynced)}")
    everything = [ok for kind, passed in results.items() if kind.startswith("ZeRO") for ok in passed]
    minutes = round((time.time() - begun) / 60, 1)
    totals: dict[str, Any] = {"kills": len(everything), "ok": sum(everything), "minutes": minutes}
    totals |= {kind: f"{sum(passed)}/{len(passed)}" for kind, passed in sorted(results.items())}
    print(json.dumps({**totals, "not_synced": len(unsynced)}), flush=True)
    return all(everything) and len(everything) >= kills and not unsynced


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damages(newest: Path, older: Path) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield each damage: what it is, a word that the message about it must have, and what does it to `newest`."""
    for rank in range(SIZE):
        shard = newest / f"shard_{rank}.safetensors"
        yield f"shard {rank}: a bit flipped", shard.name, partial(flip, shard)
        yield f"shard {rank}: truncated", shard.name, partial(os.truncate, shard, shard.stat().st_size // 2)
        yield f"shard {rank}: missing", shard.name, shard.unlink
        yield f"shard {rank}: of the older step", shard.name, partial(shutil.copy, older / shard.name, shard)
    state = newest / "state.json"
    yield "state.json: a bit flipped", state.name, partial(flip, state)
    yield "state.json: truncated", state.name, partial(os.truncate, state, state.stat().st_size // 2)
    yield "latest: empty", "latest", partial(os.truncate, newest.parent / "latest", 0)


def prove_damage(folder: Path, *, stages: Sequence[int], seed: int) -> bool:
    """Damage the newest checkpoint of a stopped run in each way; the older one must be found, and the same end."""
    starter = Starter(folder)
    failed = 0
    for stage in stages:
        flags = prepare(folder, stage, epochs=3, seed=seed)
        reference, _ = train_reference(starter, flags, f"zero{stage}_reference")
        stopped = folder / f"zero{stage}_stopped"
        started = starter.start([*flags, "--max_steps", "40"], out=stopped)
        codes = started.wait_for_end()
        found = whole_checkpoints(stopped)
        if codes != [75] * SIZE or len(found) < 2:
            raise SystemExit(f"--max_steps: exit codes {codes}, {len(found)} checkpoints\n{started.text()[-3000:]}")
        for number, (what, _, _) in enumerate(list(damages(found[0], found[1]))):
            run = folder / f"zero{stage}_damaged_{number}"
            shutil.copytree(stopped, run)
            newest, older = (run / "checkpoints" / path.name for path in found[:2])
            _, word, damage = list(damages(newest, older))[number]
            damage()
            expected = newest_step(run)
            problems = []
            if (expected == int(newest.name[5:])) != (word == "latest"):
                problems.append("the damage does nothing")
            started, problem = starter.finish(flags, out=run)
            said = [line for line in started.text().splitlines() if word in line and "resum" not in line.split(word)[0]]
            if problem is not None:
                problems.append(problem)
            if not said:
                problems.append("no line says what was wrong")
            if resumed_step(started.text()) != expected:
                problems.append(f"resumed from {resumed_step(started.text())} instead of {expected}")
            problems += differences(run, reference) if problem is None else []
            failed += bool(problems)
            print(f"zero{stage} {what}: {'; '.join(['FAIL', *problems]) if problems else 'ok'}", flush=True)
            for line in said[:1]:
                print(f"  {line.replace(str(folder), '…')}", flush=True)
    print(json.dumps({"damage": "all detected" if not failed else f"{failed} failed"}), flush=True)
    return not failed


LEAVING = [
    ("SIGTERM to {}, first step", "TERM", "train:1"),
    ("SIGTERM to {}, mid-epoch", "TERM", "train:35"),
    ("SIGTERM to {}, mid-save", "TERM", "save:1:2"),
    ("SIGTERM to {}, mid-evaluation", "TERM", "eval:2"),
]


def prove_leaving(folder: Path, *, stages: Sequence[int], seed: int) -> bool:
    """Ask ranks to stop, kill one, stop one: the others must leave in time, and the same command find the same end."""
    starter = Starter(folder)
    failed = 0
    for stage in stages:
        flags = prepare(folder, stage, epochs=3, seed=seed)
        reference, _ = train_reference(starter, flags, f"zero{stage}_reference")
        cases = [(what.format("both ranks"), sign, point, "0 1") for what, sign, point in LEAVING]
        for index, (what, sign, point) in enumerate(LEAVING):
            rank = str(index % SIZE)
            cases.append((what.format(f"rank {rank}"), sign, point, rank))
        cases += [(f"SIGKILL of rank {rank}", "KILL", "train:35", rank) for rank in ("0", "1")]
        cases += [(f"SIGSTOP of rank {rank}", "STOP", "train:35", rank) for rank in ("0", "1")]
        for number, (what, sign, point, ranks) in enumerate(cases):
            run = folder / f"zero{stage}_leaving_{number}"
            problems, line = leave(starter, flags, run=run, point=point, ranks=ranks, sign=sign)
            started, problem = starter.finish(flags, out=run)
            problems += [f"the next start: {problem}"] if problem is not None else differences(run, reference)
            failed += bool(problems)
            verdict = "; ".join(["FAIL", *problems]) if problems else "ok"
            print(f"zero{stage} {what}: {line}; resumed from {resumed_step(started.text())}: {verdict}", flush=True)
    print(json.dumps({"leaving": "all in time" if not failed else f"{failed} failed"}), flush=True)
    return not failed


def leave(
    starter: Starter, flags: Sequence[str], *, run: Path, point: str, ranks: str, sign: str
) -> tuple[list[str], str]:
    """Send a signal at a point; return what went wrong, and a line with times and codes."""
    started = starter.start(flags, out=run, point=point, ranks=ranks, sign=sign)
    wait(lambda: started.fired() or not started.living(), seconds=PATIENCE)
    event = started.fired()
    if event is None:
        codes = started.codes()
        started.end()
        return [f"the point {point} never came, exit codes {codes}"], ""
    staying = {started.processes[int(rank)].pid for rank in ranks.split()} if sign == "STOP" else set()
    limit = GRACE if sign == "TERM" else RANK_TIMEOUT + 8.0
    waiting = started.processes[1 - int(ranks)].pid if staying else None

    def gone() -> bool:
        living = started.living()
        return waiting not in living if staying else not living

    wait(gone, seconds=limit - (time.time() - event["time"]))
    seconds = time.time() - event["time"]
    codes = started.codes()
    problems = [] if gone() else [f"still there after {limit:.0f} s"]
    started.end()
    text = started.text()
    line = f"left in {seconds:.1f} s, exit codes {codes}"
    if sign == "TERM" and codes != [75] * SIZE:
        problems.append("exit codes other than 75")
    if sign in ("KILL", "STOP"):
        message = [said for said in text.splitlines() if f"rank {ranks}" in said.lower()]
        if not message:
            problems.append(f"no message names rank {ranks}")
        line += f", '{message[0].replace(str(starter.folder), '…')}'" if message else ""
        if codes[1 - int(ranks)] not in (1, 75):
            problems.append(f"the other rank's exit code is {codes[1 - int(ranks)]}")
    return problems, line


def main() -> None:
    """Run one of the proofs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damage", action="store_true", help="damaged checkpoints instead of kills")
    parser.add_argument("--leaving", action="store_true", help="signals, and ranks that die or hang, instead of kills")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="stages at the same time; a pair of ranks each")
    parser.add_argument("--epochs", type=int, default=24, help="of a run that is killed; 23 steps each")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="is emptied first")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder: Path = options.out.resolve()
    mark = folder / ".chaos"
    if folder.exists() and not mark.exists():
        raise SystemExit(f"{folder} is not a folder that this program made. Give another --out.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.touch()
    if options.damage:
        passed = prove_damage(folder, stages=options.stages, seed=options.seed)
    elif options.leaving:
        passed = prove_leaving(folder, stages=options.stages, seed=options.seed)
    else:
        passed = prove_kills(
            folder,
            kills=options.kills,
            stages=options.stages,
            seed=options.seed,
            epochs=options.epochs,
            jobs=options.jobs,
        )
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
