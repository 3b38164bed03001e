"""The DeepSpeed engine of one model: with `checkpoint.py`, the only place that touches deepspeed.

What the rest of dsimg sees is the same at every ZeRO stage and precision: `forward`, `backward`, `step` with the true
gradient norm, and the fp32 weights as `Fragment`s, the pieces of each named parameter that this rank's optimizer owns.
"""

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsimg.errors import ConfigError, DeviceError, DsimgError, RunError

# Without this DeepSpeed warns on every machine that has no GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed

COLLECTIVE_TIMEOUT = timedelta(minutes=30)

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
                    RunError(f"{error.filename or 'a file'}: {error.strerror}. Mend that and give the command again.")
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

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor on `device` (in place)."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


def start_world() -> World:
    """Join the process group of the launcher, or make one of a single rank.

    Raises DeviceError when more ranks than GPUs are asked for on this machine.
    """
    defaults = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
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
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    if not dist.is_initialized():
        _forbid_shared_memory_operator()
        try:
            deepspeed.init_distributed("nccl" if cuda else "gloo", timeout=COLLECTIVE_TIMEOUT, verbose=False)
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


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def bf16_is_fast(device: torch.device) -> bool:
    """Tell whether the device computes in bf16 natively: CUDA from Ampere on, a CPU with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _forbid_shared_memory_operator() -> None:
    """Keep DeepSpeed from compiling `deepspeed_shm_comm` with g++ at the first start of several CPU ranks.

    It takes about a minute, needs a compiler, and gloo does the same work.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def inference_forward(model: nn.Module, *, config: Mapping[str, Any] | None, world: World) -> Callable[[Tensor], Any]:
    """Return the network's forward in evaluation mode: normalised images (N, 3, H, W) -> outputs in fp32.

    With a resolved DeepSpeed JSON the network runs in its precision, sharded over the ranks at ZeRO-3; stages 1 and 2
    shard nothing that inference has. Without one, every rank holds the whole network in fp32.
    """
    model = model.to(world.device).eval()
    if config is None:
        return lambda images: _to_float(model(images))
    zero = dict(config.get("zero_optimization", {}))
    if int(zero.get("stage", 0)) in (1, 2):
        zero = {"stage": 0}
    zero.pop("offload_optimizer", None)
    settings = {**config, "zero_optimization": zero}
    _forget_autocast()
    engine, _, _, _ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    engine.eval()
    dtype = _input_dtype(engine)
    return lambda images: _to_float(engine(images.to(dtype)))


def _forget_autocast() -> None:
    """Reset DeepSpeed's autocast flags: they are module globals, and an earlier engine's would leak into the next."""
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


def _input_dtype(engine: Any) -> torch.dtype:
    """Return what DeepSpeed's engine wants its inputs in: autocast takes fp32, its own 16-bit modes their type."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer that dsimg builds itself, from torch (or timm for LAMB)."""

    name: str  # sgd, adamw, adam, lamb
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    nesterov: bool = True


def build_optimizer(spec: OptimizerSpec, groups: Sequence[Mapping[str, Any]], *, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer over parameter groups that carry their own weight decay."""
    parameters: Any = [dict(group) for group in groups]
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=spec.momentum, nesterov=spec.nesterov and spec.momentum > 0)
    if spec.name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=spec.betas, eps=spec.eps)
    if spec.name == "adam":
        return torch.optim.Adam(parameters, lr=lr, betas=spec.betas, eps=spec.eps)
    assert spec.name == "lamb"
    try:
        from timm.optim.lamb import Lamb
    except ImportError as error:
        raise ConfigError("the optimizer lamb needs timm: pip install 'dsimg[timm]'") from error
    optimizer: torch.optim.Optimizer = Lamb(parameters, lr=lr, betas=spec.betas, eps=spec.eps)
    return optimizer


@dataclass(frozen=True)
class Fragment:
    """A piece of one parameter that this rank's optimizer owns: `numel` elements from `start` of the flattened
    parameter, kept in fp32 in `owner` (a tensor the optimizer knows) from `offset` on."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    owner: Tensor
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        """Return this fragment's part of `tensor`, which is shaped like `owner`."""
        return tensor.detach().reshape(-1).narrow(0, self.offset, self.numel)


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step did. `grad_norm` is before clipping and without loss scale; NaN or inf when skipped."""

    lr: float  # of the first parameter group, as this step used it
    grad_norm: float
    skipped: bool
    loss_scale: float | None


class Engine:
    """DeepSpeed's engine with one behaviour at every ZeRO stage and precision."""

    def __init__(
        self,
        model: nn.Module,
        *,
        config: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        optimizer: OptimizerSpec | None,
        lr: float,
        world: World,
        ema_decay: float = 0.0,
    ) -> None:
        """`config` is a resolved DeepSpeed JSON. `optimizer` None means that DeepSpeed builds the JSON's own; `lr` is
        what its scheduler, if any, starts from."""
        self.world = world
        self.zero_stage = int(config.get("zero_optimization", {}).get("stage", 0))
        self.accumulation = int(config["gradient_accumulation_steps"])
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._shapes = {name: tuple(parameter.shape) for parameter, name in self._names.items()}
        _forget_autocast()
        settings = dict(config)
        arguments: dict[str, Any] = {}
        if optimizer is None:
            arguments["model_parameters"] = [dict(group) for group in groups]
        else:
            settings.pop("optimizer", None)
            arguments["optimizer"] = build_optimizer(optimizer, groups, lr=lr)
        self._engine, _, _, _ = deepspeed.initialize(
            model=model.to(world.device), config=settings, dist_init_required=False, **arguments
        )
        self.module: nn.Module = self._engine.module
        self._input_dtype = _input_dtype(self._engine)
        self.ema_decay = ema_decay
        self._ema: list[Tensor] = [owner.detach().clone() for owner in self.owners()] if ema_decay else []
        self.skipped_steps = 0

    # --- training

    def train(self) -> None:
        """Set the network to training mode."""
        self._engine.train()

    def eval(self) -> None:
        """Set the network to evaluation mode."""
        self._engine.eval()

    def forward(self, images: Tensor) -> Any:
        """Run the network on normalised float images (N, 3, H, W) on the device; its outputs come back in fp32."""
        return _to_float(self._engine(images.to(self._input_dtype)))

    def backward(self, loss: Tensor, *, boundary: bool) -> None:
        """Accumulate the gradients of `loss` / accumulation. `boundary` marks a step's last micro-batch.

        The caller says where a step ends, since an epoch's tail may have fewer micro-batches.
        """
        self._engine.set_gradient_accumulation_boundary(boundary)
        self._engine.backward(loss)

    def step(self, *, lr: float | None) -> StepInfo:
        """Take the optimizer step at a boundary with this learning rate (None: the JSON's scheduler sets it).

        A step with a NaN or infinite gradient leaves the weights as they are, on every rank and at every stage.
        """
        optimizer = self._engine.optimizer
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        used_lr = float(optimizer.param_groups[0]["lr"])
        scaler = self._grad_scaler()
        scale = scaler.get_scale() if scaler is not None else 1.0
        plain = optimizer is self._engine.basic_optimizer  # ZeRO 0 without 16-bit weights: no wrapper around it
        norm = math.nan
        if plain:
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in self._names if p.grad is not None])) / scale
            if not math.isfinite(norm) and scaler is None:
                self._engine.zero_grad()  # without gradients torch's optimizers leave weights and states alone
        self._engine.step()
        if plain:
            skipped = not math.isfinite(norm)
        else:
            skipped = not self._engine._step_applied
            norm = float(self._engine.get_global_grad_norm()) / scale
            if skipped and scaler is not None:
                # ZeRO returns before it steps the scaler, which would keep a scale that overflows for ever.
                scaler.update(scale * scaler.get_backoff_factor())
        self.skipped_steps += skipped
        if self._ema and not skipped:
            torch._foreach_lerp_(self._ema, self.owners(), 1.0 - self.ema_decay)
        loss_scale = scale if scaler is not None else None
        if self._engine.fp16_enabled():
            loss_scale = float(optimizer.loss_scale)
        return StepInfo(used_lr, norm, skipped, loss_scale)

    def _grad_scaler(self) -> Any:
        """Return the GradScaler of fp16 autocast, which lives in the engine at ZeRO 0 and in the optimizer above."""
        return (
            getattr(self._engine.optimizer, "torch_autocast_gradscaler", None)
            or self._engine.torch_autocast_z0_gradscaler
        )

    @property
    def optimizer_name(self) -> str:
        """The class of the optimizer that steps the fp32 weights."""
        return type(self._engine.basic_optimizer).__name__

    def scheduler_state(self) -> dict[str, Any] | None:
        """Return the state of the JSON's scheduler for a checkpoint, None without one."""
        scheduler = self._engine.lr_scheduler
        if scheduler is None:
            return None
        return {key: value for key, value in scheduler.state_dict().items() if _is_plain(value)}

    def load_scheduler_state(self, state: dict[str, Any] | None) -> None:
        """Put the JSON's scheduler, and the learning rates it set, where `scheduler_state` found them."""
        scheduler = self._engine.lr_scheduler
        if scheduler is None or state is None:
            return
        scheduler.load_state_dict(state)
        if hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's: it sets the rates of the iteration it is told
            scheduler.step(scheduler.last_batch_iteration)
        else:
            for group, lr in zip(self._engine.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr

    def write_monitor(self, values: Mapping[str, float], samples: int) -> None:
        """Send scalars to the monitors that the DeepSpeed JSON names (tensorboard, csv, wandb), from rank 0."""
        if self._engine.monitor.enabled and self.world.rank == 0:
            self._engine.monitor.write_events([(name, value, samples) for name, value in values.items()])

    # --- BatchNorm

    @torch.no_grad()
    def pool_batchnorm(self) -> None:
        """Make the BatchNorm running statistics those of all ranks' data: DeepSpeed never synchronises them.

        The pooled mean is the mean of means; the pooled variance adds the variance of the means.
        """
        layers = [
            m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
        ]
        if self.world.size == 1 or not layers:
            return
        means = [layer.running_mean for layer in layers if layer.running_mean is not None]
        variances = [layer.running_var for layer in layers if layer.running_var is not None]
        mean = torch.cat([m.float() for m in means])
        square = torch.cat([v.float() for v in variances]) + mean.square()
        both = self.world.sum(torch.stack([mean, square])) / self.world.size
        mean, variance = both[0], (both[1] - both[0].square()).clamp_(min=0)
        sizes = [m.numel() for m in means]
        for target, part in zip(means, torch.split(mean, sizes), strict=True):
            target.copy_(part)
        for target, part in zip(variances, torch.split(variance, sizes), strict=True):
            target.copy_(part)

    # --- fp32 weights

    def owners(self) -> list[Tensor]:
        """Return the fp32 tensors that this rank's optimizer steps, in a fixed order."""
        optimizer = self._engine.optimizer
        if self.zero_stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        if hasattr(optimizer, "single_partition_of_fp32_groups"):
            return list(optimizer.single_partition_of_fp32_groups)
        if hasattr(optimizer, "fp32_groups_flat_partition"):
            return list(optimizer.fp32_groups_flat_partition)
        if hasattr(optimizer, "fp32_groups_flat"):
            return list(optimizer.fp32_groups_flat)
        if hasattr(optimizer, "fp32_groups"):
            return [master for group in optimizer.fp32_groups for master in group]
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def fragments(self) -> Iterator[Fragment]:
        """Yield the pieces of the parameters that this rank owns. At ZeRO 0 every rank owns everything."""
        optimizer = self._engine.optimizer
        owners = self.owners()
        if self.zero_stage == 3:
            for parameter, name in self._names.items():
                group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = numel * self.world.rank
                real = max(0, min(numel, math.prod(self._shapes[name]) - start))
                if real:
                    yield Fragment(name, self._shapes[name], start, real, owners[group], offset)
        elif self.zero_stage in (1, 2):
            for parameter, name in self._names.items():
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is not None:
                    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                    owner = owners[mapping.param_group_index]
                    yield Fragment(name, self._shapes[name], low.start, high.numel, owner, high.start)
        elif hasattr(optimizer, "fp32_groups_flat"):
            for index, group in enumerate(optimizer.fp16_groups):
                offset = 0
                for parameter in group:
                    name = self._names[parameter]
                    yield Fragment(name, self._shapes[name], 0, parameter.numel(), owners[index], offset)
                    offset += parameter.numel()
        else:
            parameters = [
                parameter
                for group in (getattr(optimizer, "fp16_groups", None) or [g["params"] for g in optimizer.param_groups])
                for parameter in group
            ]
            for parameter, owner in zip(parameters, owners, strict=True):
                name = self._names[parameter]
                yield Fragment(name, self._shapes[name], 0, owner.numel(), owner, 0)

    def optimizer_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return the optimizer's state by owner tensor, as torch keeps it."""
        state: dict[Tensor, dict[str, Any]] = self._engine.basic_optimizer.state
        return state

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the network's working weights those of the fp32 masters (all ranks together)."""
        optimizer = self._engine.optimizer
        if self.zero_stage == 3:
            for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
                optimizer.fp16_partitioned_groups_flat[index].data.copy_(master.data)
                optimizer._unflatten_partitioned_parameters(index)
            persistent = optimizer.persistent_parameters
            if persistent:
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)
        elif self.zero_stage in (1, 2):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_groups_flat"):
            for fragment, parameter in self._pairs():
                parameter.copy_(fragment.view(fragment.owner).view_as(parameter))
        elif hasattr(optimizer, "fp32_groups"):
            for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for parameter, master in zip(group, masters, strict=True):
                    parameter.copy_(master)

    def _pairs(self) -> Iterator[tuple[Fragment, Tensor]]:
        by_name = {name: parameter for parameter, name in self._names.items()}
        for fragment in self.fragments():
            yield fragment, by_name[fragment.name]

    @property
    def ema(self) -> list[Tensor]:
        """The exponential moving average of each of `owners()`, or an empty list without EMA."""
        return self._ema

    @contextmanager
    @torch.no_grad()
    def ema_weights(self) -> Iterator[None]:
        """Compute with the EMA weights inside the `with`, and with the trained ones again after it."""
        if not self._ema:
            yield
            return
        kept = [owner.detach().clone() for owner in self.owners()]
        for owner, average in zip(self.owners(), self._ema, strict=True):
            owner.data.copy_(average)
        self.refresh()
        try:
            yield
        finally:
            for owner, weight in zip(self.owners(), kept, strict=True):
                owner.data.copy_(weight)
            self.refresh()

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """Return the fp32 weights and the buffers on the CPU (on rank 0; {} elsewhere). All ranks take part.

        One parameter at a time is assembled on the device.
        """
        state: dict[str, Tensor] = {}
        mine = {fragment.name: fragment for fragment in self.fragments()}
        for name, shape in self._shapes.items():
            fragment = mine.get(name)
            if self.zero_stage == 0:
                assert fragment is not None
                full = fragment.view(fragment.owner)
            else:
                full = torch.zeros(math.prod(shape), device=self.world.device)
                if fragment is not None:
                    full[fragment.start : fragment.start + fragment.numel] = fragment.view(fragment.owner).to(
                        full.device
                    )
                self.world.sum(full)
            if self.world.rank == 0:
                state[name] = full.view(shape).to("cpu", torch.float32, copy=True)
        if self.world.rank != 0:
            return {}
        keys = list(self.module.state_dict(keep_vars=True))
        buffers = {name: buffer.detach().cpu().clone() for name, buffer in self.module.named_buffers() if name in keys}
        frozen = {
            name: parameter.detach().cpu().float().clone()
            for name, parameter in self.module.named_parameters()
            if not parameter.requires_grad
        }
        everything = {**state, **buffers, **frozen}
        return {key: everything[key] for key in keys if key in everything}

    # --- memory

    def allocated_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters, gradients and optimizer states, counted from the tensors
        that are alive now. Call it between `backward` at a boundary and `step` to see the gradients."""
        optimizer = self._engine.optimizer
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter in self.module.parameters():
            parameters.append(parameter.data)
            if self.zero_stage == 3:
                parameters.append(parameter.ds_tensor)  # type: ignore[attr-defined]
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        for holder in ("averaged_gradients", "_ZeroOptimizer__param_id_to_grad_partition"):
            found = getattr(optimizer, holder, None)
            if isinstance(found, dict):
                for value in found.values():
                    gradients += [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]
        flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
        if isinstance(flat, Tensor):
            gradients.append(flat)
        states = [t for owned in self.optimizer_state().values() for t in owned.values() if isinstance(t, Tensor)]
        owners = self.owners()
        known = _storages(parameters)
        masters = [owner for owner in owners if owner.untyped_storage().data_ptr() not in known]
        return {
            "parameters": sum(known.values()),
            "gradients": sum(_storages(gradients).values()),
            "optimizer": sum(_storages([*states, *masters]).values()),
        }

    def peak_memory(self) -> int:
        """Return the peak bytes allocated on this rank's GPU, or of this process's resident memory without one."""
        if self.world.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.world.device))
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _is_plain(value: Any) -> bool:
    """Tell whether JSON can hold a value."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().nbytes()
    }


def _to_float(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.float()
    if isinstance(output, tuple):
        parts = [_to_float(part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)
    return output
