"""`dsimg <stage>`: one table from a stage's name to the function that is it, imported on use."""

import importlib
import sys

from dsimg import __version__, cli
from dsimg.console import Terminal
from dsimg.errors import near
from dsimg.runtime import SERVE

TRAIN = "pip install 'dsimg[train]'"
STAGES = {
    "train": ("dsimg.train:train", "train an image classifier with DeepSpeed"),
    "evaluate": ("dsimg.evaluate:evaluate", "measure a run on a folder of images, every image once"),
    "distill": ("dsimg.distill:distill", "train a small network to say what a large one says"),
    "prune": ("dsimg.prune:prune", "cut channels out of a network until it is as small or as fast as asked"),
    "export": ("dsimg.export:export", "write a network as one ONNX file, compared with PyTorch"),
    "quantize": (
        "dsimg_export.quantize:quantize",
        "write an exported network in int8; what it costs and wins",
    ),
    "verify": ("dsimg_export.verify:verify", "prove that a run says on this machine what it said where it was made"),
    "serve": ("dsimg_export.serve:serve", "answer images over HTTP with exported runs, which are verified first"),
    "deploy": ("dsimg_export.deploy:deploy", "write what Docker and Kubernetes, Triton, KServe or Ray need"),
    "bench": ("dsimg_export.bench:bench", "measure how fast exported runs are, all in turn, with intervals"),
    "predict": ("dsimg.predict:predict", "say what is on images: the best classes and their probabilities"),
    "show": ("dsimg.show:show", "tell how a run came about, from its file back to the training images"),
    "compress": ("dsimg_export.compress:compress", "find the fastest network that is good enough, by the other stages"),
    "doctor": ("dsimg.doctor:doctor", "prove that a stopped and resumed run is the run that never stopped"),
}


def main() -> None:
    """Run the stage named by the first argument."""
    name, rest = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    terminal = Terminal()
    if name in ("--version", "-V"):
        terminal.say(f"dsimg {__version__}")
    elif name in ("--help", "-h"):
        terminal.say("usage: dsimg STAGE [flags]      `dsimg STAGE --help` lists a stage's flags\n")
        terminal.table("stages", [(stage, about) for stage, (_, about) in STAGES.items()])
    elif name in STAGES:
        module, _, function = STAGES[name][0].partition(":")
        cli.run(getattr(_import_stage(module), function), rest)
    else:
        terminal.say(f"error: there is no stage '{name}'{near(name, STAGES)} `dsimg --help` lists them.")
        sys.exit(2)


def _import_stage(module: str) -> object:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("dsimg", "dsimg_export"):
            raise
        serves = module.startswith("dsimg_export.") or error.name.partition(".")[0] == "onnxruntime"
        Terminal().say(f"error: {module} needs the package '{error.name}': {SERVE if serves else TRAIN}")
        sys.exit(2)


if __name__ == "__main__":
    main()
