"""The DeepSpeed engine that trains one model: with `forward.py` and `world.py`, what touches deepspeed.

What the rest of dsimg sees is the same at every ZeRO stage and precision: `forward`, `backward`, `step` with the true
gradient norm, and the fp32 weights as `Fragment`s, the pieces of each named parameter that this rank's optimizer owns.
"""

import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsimg.forward import forget_autocast, input_dtype, to_float
from dsimg.optimizers import OptimizerSpec, build_optimizer
from dsimg.world import World

# isort: split
import deepspeed  # after dsimg.world, which tells it the device

SCALE_GROWTH_STEPS = 2000  # GradScaler's own growth_interval
# What changes in DeepSpeed's own loss scaler as training goes on.
FP16_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


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
    skipped_steps: int  # of the run so far
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
        forget_autocast()
        settings = dict(config)
        self._clipping = float(config["gradient_clipping"])
        if self.zero_stage == 0 and not any(config.get(block, {}).get("enabled") for block in ("bf16", "fp16")):
            settings["gradient_clipping"] = 0.0  # see `_plain_step`
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
        self._input_dtype = input_dtype(self._engine)
        optimizer_in_use = self._engine.optimizer
        # ZeRO 0 with fp32 weights has no wrapper around the optimizer. Its clipping, too, is done here: DeepSpeed's
        # fails on a step without gradients, and computes the norm a second time.
        self._plain = optimizer_in_use is self._engine.basic_optimizer
        # fp16 autocast's scaler lives in the engine at ZeRO 0 and in the optimizer above.
        self._scaler = self._engine.torch_autocast_z0_gradscaler
        if not self._plain:
            self._scaler = getattr(optimizer_in_use, "torch_autocast_gradscaler", None)
            if self._scaler is not None:
                self._scaler.set_growth_interval(2**31 - 1)
        self._steps_at_scale = 0
        scaler = self._fp16_scaler()
        if scaler is not None:
            scaler.raise_error_at_min_scale = False  # `Health` ends such a run, and says where it went wrong
        self._ema_decay = ema_decay
        self.ema_steps = 0
        self._ema: list[Tensor] = [owner.detach().clone() for owner in self.owners()] if ema_decay else []
        self._ema_buffers = [buffer.detach().clone() for buffer in self._float_buffers()] if ema_decay else []
        self._good_buffers: list[Tensor] = []  # as they were after the last step that was taken
        self.skipped_steps = 0

    # --- training

    def train(self) -> None:
        """Set the network to training mode."""
        self._engine.train()
        self._good_buffers = [buffer.detach().clone() for buffer in self._float_buffers()]

    def eval(self) -> None:
        """Set the network to evaluation mode."""
        self._engine.eval()

    def forward(self, images: Tensor) -> Any:
        """Run the network on normalised float images (N, 3, H, W) on the device; its outputs come back in fp32."""
        return to_float(self._engine(images.to(self._input_dtype)))

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
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        if self._plain:
            norm, skipped = self._plain_step(scale)
        else:
            norm, skipped = self._wrapped_step(scale)
        self.skipped_steps += skipped
        # A forward pass that is not finite leaves BatchNorm's running statistics so, for good.
        if self._good_buffers:
            pair = (self._float_buffers(), self._good_buffers)
            torch._foreach_copy_(*(pair if skipped else reversed(pair)))
        if self._ema and not skipped:
            self._average()
        loss_scale = scale if self._scaler is not None else None
        if self._engine.fp16_enabled():
            loss_scale = float(optimizer.loss_scale)
        return StepInfo(used_lr, norm, skipped, self.skipped_steps, loss_scale)

    def _plain_step(self, scale: float) -> tuple[float, bool]:
        """Step at ZeRO 0 with fp32 weights, where DeepSpeed neither knows the norm nor skips what is not finite."""
        gradients = [p.grad for p in self._names if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / scale
        if math.isfinite(norm):
            if self._clipping > 0 and norm > self._clipping:
                torch._foreach_mul_(gradients, self._clipping / (norm + 1e-6))
        elif self._scaler is None:
            self._engine.zero_grad()  # without gradients torch's optimizers leave weights and states alone
        self._engine.step()
        return norm, not math.isfinite(norm)

    def _wrapped_step(self, scale: float) -> tuple[float, bool]:
        """Step through DeepSpeed's own optimizer wrapper, mending what it does to fp16 autocast's scaled gradients."""
        optimizer = self._engine.optimizer
        if self._scaler is not None:
            # It holds the scaled norm against the clipping that is meant for the unscaled one.
            optimizer.clip_grad = self._clipping * scale
        self._engine.step()
        skipped = not self._engine._step_applied
        if self._scaler is not None:
            # It steps the scaler once a parameter group, and not at all when it skips: the scale is kept here instead.
            if skipped:
                self._scaler.update(scale * self._scaler.get_backoff_factor())
                self._steps_at_scale = 0
            else:
                self._steps_at_scale += 1
                if self._steps_at_scale == SCALE_GROWTH_STEPS:
                    self._scaler.update(scale * self._scaler.get_growth_factor())
                    self._steps_at_scale = 0
        return float(self._engine.get_global_grad_norm()) / scale, skipped

    @torch.no_grad()  # without it the averages would carry a graph of all the steps before
    def _average(self) -> None:
        """Move the moving averages towards the weights, faster in the first steps (as timm's ModelEmaV3 does)."""
        self.ema_steps += 1
        decay = min(self._ema_decay, (1 + self.ema_steps) / (10 + self.ema_steps))
        torch._foreach_lerp_(self._ema, self.owners(), 1.0 - decay)
        if self._ema_buffers:
            torch._foreach_lerp_(self._ema_buffers, self._float_buffers(), 1.0 - decay)

    def _float_buffers(self) -> list[Tensor]:
        """Return the buffers that can be averaged: BatchNorm's running statistics."""
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]

    def counters(self) -> dict[str, Any]:
        """Return what else a checkpoint needs, as JSON: loss scale, EMA's steps, the JSON's scheduler."""
        scheduler = self._engine.lr_scheduler
        state = scheduler.state_dict() if scheduler is not None else {}
        scaler = self._fp16_scaler()
        return {
            "skipped_steps": self.skipped_steps,
            "ema_steps": self.ema_steps,
            "scaler": self._scaler_state(),
            "fp16_scaler": {key: getattr(scaler, key) for key in FP16_SCALER} if scaler is not None else {},
            "scheduler": {key: value for key, value in state.items() if _is_plain(value)},
        }

    def load_counters(self, state: Mapping[str, Any]) -> None:
        """Go on from what `counters` returned."""
        self.skipped_steps, self.ema_steps = state["skipped_steps"], state["ema_steps"]
        if self._scaler is not None and state["scaler"]:
            # At ZeRO 1 to 3 the steps since the scale changed are counted here, at 0 by torch's scaler.
            self._steps_at_scale = state["scaler"]["steps"]
            own = self._scaler.state_dict()
            tracker = 0 if not self._plain else self._steps_at_scale
            self._scaler.load_state_dict({**own, "scale": state["scaler"]["scale"], "_growth_tracker": tracker})
        scaler = self._fp16_scaler()
        if scaler is not None:
            for key, value in state["fp16_scaler"].items():
                setattr(scaler, key, value)
        scheduler = self._engine.lr_scheduler
        if scheduler is None:
            return
        scheduler.load_state_dict(state["scheduler"])
        if hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's: it sets the rates of the iteration it is told
            scheduler.step(scheduler.last_batch_iteration)
        else:
            for group, lr in zip(self._engine.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr

    def _scaler_state(self) -> dict[str, float]:
        """Return the loss scale of fp16 autocast and the steps since it changed; {} in other precisions."""
        if self._scaler is None:
            return {}
        steps = self._scaler.state_dict()["_growth_tracker"] if self._plain else self._steps_at_scale
        return {"scale": self._scaler.get_scale(), "steps": steps}

    def _fp16_scaler(self) -> Any:
        """Return DeepSpeed's own dynamic loss scaler, or None in other precisions."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def optimizer_counters(self) -> dict[str, int]:
        """Return what an optimizer counts for all parameters together: LAMB's step."""
        group = self._engine.optimizer.param_groups[0]
        return {key: int(group[key]) for key in ("step",) if key in group}

    def load_optimizer_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from what `optimizer_counters` returned."""
        for group in self._engine.optimizer.param_groups:
            group.update({key: torch.tensor(float(value)) for key, value in counters.items()})  # as timm keeps them

    def write_monitor(self, values: Mapping[str, float | None], samples: int) -> None:
        """Send scalars to the monitors that the DeepSpeed JSON names (tensorboard, csv, wandb), from rank 0."""
        if self._engine.monitor.enabled and self.world.rank == 0:
            self._engine.monitor.write_events(
                [(name, value, samples) for name, value in values.items() if value is not None]
            )

    def close(self) -> None:
        """Give the memory back, since DeepSpeed keeps its engines for good. Nothing of this one works afterwards."""
        tensors = [*self.owners(), *self.module.parameters(), *self._ema, *self._ema_buffers]
        optimizer = self._engine.optimizer
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        self._engine.destroy()
        for tensor in (*tensors, *states):
            tensor.data = tensor.data.new_empty(0)

    # --- BatchNorm

    @torch.no_grad()
    def pool_batchnorm(self) -> None:
        """Make the BatchNorm running statistics, and EMA's averages of them, those of all ranks' data.

        DeepSpeed never synchronises them. The pooled mean is the mean of means; the pooled variance adds the variance
        of the means.
        """
        layers = [
            m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
        ]
        if self.world.size == 1 or not layers:
            return
        means = [layer.running_mean for layer in layers if layer.running_mean is not None]
        variances = [layer.running_var for layer in layers if layer.running_var is not None]
        self._pool(means, variances)
        if self._ema:
            average = {id(own): mean for own, mean in zip(self._float_buffers(), self._ema_buffers, strict=True)}
            self._pool([average[id(mean)] for mean in means], [average[id(variance)] for variance in variances])

    def _pool(self, means: Sequence[Tensor], variances: Sequence[Tensor]) -> None:
        own_mean, own_variance = (torch.cat(list(parts)).double() for parts in (means, variances))
        mean = self.world.sum(own_mean.clone()) / self.world.size
        variance = self.world.sum(own_variance + (own_mean - mean).square()) / self.world.size
        sizes = [m.numel() for m in means]
        for targets, pooled in ((means, mean), (variances, variance)):
            for target, part in zip(targets, torch.split(pooled, sizes), strict=True):
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
            optimizer.empty_partition_cache()  # what a forward pass has left gathered has the values of before
            persistent = optimizer.persistent_parameters
            if persistent:
                persistent[0].all_gather(persistent)
        elif self.zero_stage in (1, 2):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_groups_flat"):
            parameters = {name: parameter for parameter, name in self._names.items()}
            for fragment in self.fragments():
                parameters[fragment.name].copy_(fragment.view(fragment.owner).view(fragment.shape))
        elif hasattr(optimizer, "fp32_groups"):
            for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for parameter, master in zip(group, masters, strict=True):
                    parameter.copy_(master)

    @property
    def ema(self) -> list[Tensor]:
        """The exponential moving average of each of `owners()`, or an empty list without EMA."""
        return self._ema

    def buffers(self) -> dict[str, Tensor]:
        """Return the network's buffers by name, and the averages of those that EMA averages, as `ema:NAME`."""
        named = dict(self.module.named_buffers())
        averaged = [name for name, buffer in named.items() if buffer.is_floating_point()] if self._ema else []
        return named | {f"ema:{name}": value for name, value in zip(averaged, self._ema_buffers, strict=True)}

    @contextmanager
    @torch.no_grad()
    def ema_weights(self) -> Iterator[None]:
        """Compute with the EMA weights inside the `with`, and with the trained ones again after it."""
        if not self._ema:
            yield
            return
        kept = [tensor.detach().clone() for tensor in (*self.owners(), *self._float_buffers())]
        self._put((*self._ema, *self._ema_buffers))
        yield
        # Not after an exception, which ends the run: all ranks take part in this, and one may have failed alone.
        self._put(kept)

    def _put(self, values: Sequence[Tensor]) -> None:
        """Set the fp32 weights, the network's working weights with them, and BatchNorm's statistics."""
        for target, value in zip((*self.owners(), *self._float_buffers()), values, strict=True):
            target.data.copy_(value)
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
                    piece = fragment.view(fragment.owner)
                    full[fragment.start : fragment.start + fragment.numel].copy_(piece)
                self.world.sum(full)
            if self.world.rank == 0:
                state[name] = full.view(shape).to("cpu", torch.float32, copy=True)
        frozen = self.frozen()
        if self.world.rank != 0:
            return {}
        buffers = {name: buffer.detach().cpu().clone() for name, buffer in self.module.named_buffers()}
        everything = {**state, **frozen, **buffers}
        return {name: everything[stored] for name, (_, stored) in self.layout().items()}

    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return for each name of the state dict the tensor's shape and the name that it goes by here: tied weights
        have one tensor and several names."""
        tensors = (
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        )
        first: dict[int, str] = {}
        for name, tensor in tensors:
            first.setdefault(id(tensor), name)
        # At ZeRO-3 a parameter is empty between uses; DeepSpeed keeps its shape beside it.
        everything = {
            name: (tuple(getattr(tensor, "ds_shape", tensor.shape)), first[id(tensor)]) for name, tensor in tensors
        }
        return {name: everything[name] for name in self.module.state_dict(keep_vars=True)}

    def frozen(self) -> dict[str, Tensor]:
        """Return the parameters that are not trained, in fp32 on the CPU. All ranks take part."""
        values = {}
        for name, parameter in self._frozen():
            with deepspeed.zero.GatheredParameters(parameter, enabled=self.zero_stage == 3):
                values[name] = parameter.detach().to("cpu", torch.float32, copy=True)
        return values

    @torch.no_grad()
    def load_frozen(self, fill: Callable[[Tensor, str], None]) -> None:
        """Set the parameters that are not trained: `fill(flat fp32 tensor, name)` on every rank."""
        for name, parameter in self._frozen():
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=self.zero_stage == 3):
                values = torch.empty(parameter.numel())
                fill(values, name)
                parameter.copy_(values.view(parameter.shape))

    def _frozen(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p not in self._names]

    # --- health

    @torch.no_grad()
    def checksums(self) -> tuple[list[str], Tensor]:
        """Return the names of the parameters that every rank holds whole, and a checksum of each (P,) int64: the sum
        of its bits. At ZeRO-3 these are the few that are not sharded."""
        names, sums = [], []
        for name, parameter in self.module.named_parameters():
            if parameter.numel() and (self.zero_stage < 3 or getattr(parameter, "ds_persist", False)):
                names.append(name)
                bits = torch.int32 if parameter.element_size() == 4 else torch.int16
                sums.append(parameter.detach().reshape(-1).view(bits).sum(dtype=torch.int64))
        return names, torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self.world.device)

    @contextmanager
    def largest_gradients(self) -> Iterator[dict[str, float]]:
        """Collect inside the `with`, by parameter, the largest absolute value of this rank's own gradients."""
        largest: dict[str, float] = {}

        def look(name: str) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                value = float(gradient.detach().float().abs().max()) if gradient.numel() else 0.0
                old = largest.get(name, 0.0)
                largest[name] = value if math.isnan(value) else max(value, old) if not math.isnan(old) else old

            return hook

        handles = [
            parameter.register_hook(look(name))  # type: ignore[no-untyped-call]
            for parameter, name in self._names.items()
        ]
        try:
            yield largest
        finally:
            for handle in handles:
                handle.remove()

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
