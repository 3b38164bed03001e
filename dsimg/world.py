"""The ranks: joining their process group, and what they say to one another."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsimg.console import bytes_text
from dsimg.errors import DeviceError, DsimgError, RunError
from dsimg.machine import all_cores, given_instruction_set

# Without this DeepSpeed warns on every machine that has no GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed

COLLECTIVE_SECONDS = 1800.0  # torch's own default for gloo

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks, and the device it computes on."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its value on every rank; a DsimgError of its is raised on every rank, and an
        OSError (a full disk, no permission) as a RunError."""
        holder: list[Any] = [None]
        if self.rank == 0:
            try:
                holder = [work()]
            except DsimgError as error:
                holder = [error]
            except OSError as error:
                holder = [
                    RunError(
                        f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}. Mend that and "
                        "give the command again."
                    )
                ]
        if self.size > 1:
            dist.broadcast_object_list(holder, src=0, device=self.device)
        if isinstance(holder[0], DsimgError):
            raise holder[0]
        value: T = holder[0]
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def out_of_memory(self, remedy: str) -> DeviceError:
        """Return the error for a GPU that is out of memory: what was allocated, and the remedy."""
        taken = torch.cuda.max_memory_allocated(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        return DeviceError(
            f"GPU {self.local_rank} is out of memory: {bytes_text(taken)} of its {bytes_text(total)} were allocated. "
            f"{remedy}"
        )

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor on `device` (in place)."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_later(self, values: Tensor) -> Callable[[], Tensor]:
        """Start to sum a tensor on `device` over the ranks; what is returned waits for the sum and returns it."""
        work = dist.all_reduce(values, async_op=True) if self.size > 1 else None

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return values

        return wait

    def maximum(self, values: Tensor) -> Tensor:
        """Return the maximum over ranks of a tensor on `device` (in place)."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def start_world(*, collective_seconds: float = COLLECTIVE_SECONDS) -> World:
    """Join the process group of the launcher, or make one of a single rank. A collective waits for the slowest rank
    for at most `collective_seconds`, or half an hour if that is longer.

    Raises DeviceError when more ranks than GPUs are asked for on this machine.
    """
    defaults = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any free one
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise DeviceError(
                f"{local_size} ranks were started on this machine, which has {torch.cuda.device_count()} GPU(s). "
                f"Start at most one rank per GPU: deepspeed --num_gpus {torch.cuda.device_count()} …"
            )
        torch.cuda.set_device(local_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks on one machine would each take all its cores.
        torch.set_num_threads(max(1, all_cores() // local_size))
    if not dist.is_initialized():
        _forbid_shared_memory_operator()
        try:
            timeout = timedelta(seconds=max(collective_seconds, COLLECTIVE_SECONDS))
            deepspeed.init_distributed("nccl" if cuda else "gloo", timeout=timeout, verbose=False)
        except dist.DistNetworkError as error:
            raise DeviceError(
                f"the ranks cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {_reason(error)}. "
                "If another run uses that port, give this one its own: deepspeed --master_port 29501 …"
            ) from error
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=local_size,
        device=torch.device("cuda", local_rank) if cuda else torch.device("cpu"),
    )


def _reason(error: Exception) -> str:
    """Return the last clause of a c10d message, which says why."""
    return str(error).split("message: ")[-1].splitlines()[0].strip(" .")


def bf16_is_fast(device: torch.device) -> bool:
    """Tell whether the device computes in bf16 natively: CUDA from Ampere on, a CPU with AVX512-BF16 or AMX.

    For a CPU `DSIMG_INSTRUCTION_SET` may say otherwise.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    given = given_instruction_set()
    if given is not None:
        return given == "bf16"
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _forbid_shared_memory_operator() -> None:
    """Keep DeepSpeed from compiling `deepspeed_shm_comm` with g++ at the first start of several CPU ranks.

    It takes about a minute, needs a compiler, and gloo does the same work.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
