"""The operators that HF's code dispatches besides products and attention, their bytes, and what is saved."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from flopcalc.base.errors import SpecError
from flopcalc.base.vocabulary import Convention, PassDirection, RecordedAttention, RecordedPhase
from flopcalc.core.count.products import CountedRow
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Chain, Op, Stage, iterate, join, rename_path, rename_stage
from flopcalc.core.workload.workload import Workload
from flopcalc.prediction.borrowed import (
    Borrowed,
    Outside,
    StandIn,
    borrow_layer,
    borrow_outside,
    choose_stand_in,
    choose_variant,
)
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.kernels.memory_bound import FLOAT
from flopcalc.prediction.moe_versions import RECORDED, is_routed, list_masks
from flopcalc.prediction.recordings import (
    DISTANCES,
    OUTSIDE,
    MissingSizeError,
    Scope,
    find_adapter_table,
    find_call,
    find_file,
    find_language,
    is_adapter_cast,
    is_on,
    list_features,
    list_sizes,
    list_windows,
    load_file,
    read_switches,
    sign_layer,
    sign_outside,
    sign_switches,
)
from flopcalc.prediction.rows import find_shifted
from flopcalc.prediction.trained_layers import NO_STATE, LayerState, find_states

_EXPERTS = ("olmoe", "model.layers", "mlp.experts")  # the type, layers and module whose operators other experts borrow
_MISSING = ": this model has no"
_UNCAST = (
    "autocast over float32 weights was not recorded for this model type: bf16 copies of weights, and float32 "
    "activations between products, are neither timed nor held in memory here"
)


class Operator(NamedTuple):
    """Calls of one operator in one module, or in all layers' modules of that name."""

    module: str
    group: str
    direction: PassDirection  # forward, backward
    kind: str
    reads: int  # bytes of one call
    writes: int
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody asks
    is_again: bool = False  # forward work that checkpointing runs again


class SavedTensor(NamedTuple):
    """Memory that autograd keeps until the backward pass; no parameters."""

    module: str
    group: str
    bytes: int
    count: int  # type: ignore[assignment]
    is_again: bool = False  # kept only while the backward pass of its layer runs, by checkpointing


class Operators(NamedTuple):
    """What one step dispatches besides products and attention, and what it keeps."""

    rows: tuple[Operator, ...]
    saved: tuple[SavedTensor, ...]
    notes: tuple[str, ...]
    is_recorded: bool
    has_dropout: bool = False  # attention drops weights of the language model while it trains


def list_operators(
    estimator: Estimator,
    load: Workload,
    attention: RecordedAttention = "sdpa",
    dtype_bytes: int = 2,
    transformers: str = RECORDED,
) -> Operators:
    """The operators of one step of HF's eager model: bytes of each, and what the host dispatches besides kernels.

    `attention` is HF's attn_implementation; `dtype_bytes` the size of the model's floating dtype; `transformers` the
    version whose code runs.
    """
    if estimator.renamed is None:
        return _Reader(estimator, load, attention, dtype_bytes, transformers).read()
    recorded: Any = AsRecorded(estimator)
    return _remove_head(
        recorded, _Reader(recorded, load, attention, dtype_bytes, transformers).read(), load, dtype_bytes
    )


class AsRecorded:
    """An estimator of a model with another head, its body under the names by which its operators were recorded."""

    def __init__(self, estimator: Estimator) -> None:
        assert estimator.renamed is not None
        self._estimator, (self.own, self.here) = estimator, estimator.renamed
        self.stages = tuple(rename_stage(stage, self.here, self.own) for stage in estimator.stages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._estimator, name)

    def rows(self, load: Workload, convention: Convention) -> list[CountedRow]:
        """Its rows under the recorded names."""
        paths = {here.path: own.path for here, own in zip(self._estimator.stages, self.stages, strict=True)}
        return [
            counted._replace(block=replace(counted.block, path=paths[counted.block.path]))
            for counted in self._estimator.rows(load, convention)
        ]


def _remove_head(recorded: AsRecorded, found: Operators, load: Workload, dtype_bytes: int) -> Operators:
    """The body's operators under the model's own names; of the head only what autograd keeps."""
    paths = [f"{stage.path}." for stage in recorded.stages]

    def find_name(module: str) -> str | None:
        """A recorded module's name here; None of the spec's own head, and of what reads its logits."""
        if recorded.own and not f"{module}.".startswith(f"{recorded.own}."):
            return None
        inside = f"{module}."
        if not recorded.own and not any(inside.startswith(path) or path.startswith(inside) for path in paths):
            return None
        return rename_path(module, recorded.own, recorded.here)

    rows = [row._replace(module=name) for row in found.rows if (name := find_name(row.module)) is not None]
    saved = [kept._replace(module=name) for kept in found.saved if (name := find_name(kept.module)) is not None]
    for block, row, values in recorded.rows(load, "full") if load.phase == "train" else ():
        if row.op.part == "head" and row.trains_weight and any(values):
            module = join(block.path, row.op.name)
            saved.append(SavedTensor(module, block.group, values[0] * row.op.times * row.op.n_in * dtype_bytes, 1))
    notes = [note for note in found.notes if _MISSING not in note or find_name(note.partition(": ")[0]) is not None]
    if any(op.part == "head" for stage in recorded.stages for chain in stage.layers[:1] for op in iterate(chain)):
        notes.append("the head's operators, other than its products, were not recorded and are left out")
    return found._replace(rows=tuple(rows), saved=tuple(saved), notes=tuple(notes))


def _list_experts(chain: Chain | None) -> list[str]:
    """Names of a layer's modules that take routed rows."""
    ops = iterate(chain) if chain is not None else ()
    return list(dict.fromkeys(op.name.replace("*", "#") for op in ops if is_routed(op)))


class _Reader:
    """Joins a recording with a model's sizes, its recipe and a workload."""

    def __init__(
        self, estimator: Estimator, load: Workload, attention: RecordedAttention, dtype_bytes: int, transformers: str
    ) -> None:
        self.estimator, self.load, self.attention, self.dtype_bytes = estimator, load, attention, dtype_bytes
        self.is_cast = estimator.formats.narrows_weights
        self.casts_adapters = is_adapter_cast(estimator.formats, dtype_bytes)
        self.masks = list_masks(transformers)
        self.notes: dict[str, None] = {}
        self.stand_in: StandIn | None = None  # whose operators the modules of a model that was not recorded borrow
        self.rows: dict[tuple[str, str, PassDirection, str, int, int, bool], int] = {}  # an operator without its count
        self.saved: dict[tuple[str, str, int, bool], int] = {}
        self.features = list_features(estimator, load)
        if load.decoder is None:  # a decoder recorded beside its encoder, here by itself
            own = {"made": "tokens", "made_seq": "seq", "made_pairs": "pairs", "made_square": "square"}
            self.features |= {name: self.features[alone] for name, alone in own.items()}
        self.calls = load.seq if load.phase == "decode" else 1
        self.has_images = bool(load.all_grids)
        name = str(estimator.source.config["model_type"])
        data = load_file(name)
        if data is None or not any(key.startswith(f"{load.phase} ") for key in data["parts"]):
            self.stand_in = choose_stand_in(estimator.stages)
            where = "" if data is None else f" in phase {load.phase}"
            data = load_file(self.stand_in.type)
            self._note(f"operators of {name} were not recorded{where}: those of {self.stand_in.type} are used")
            if data is None:
                raise SpecError(
                    f"{find_file(self.stand_in.type)} is missing, which stands in for {name!r}: the installation is "
                    "incomplete, install flopcalc again"
                )
        self.data: dict[str, Any] = data
        self.switches = sign_switches(estimator.source.config, data["usual"])
        self.states = find_states(estimator, load)
        self.widths = {stage.path: stage.width for stage in estimator.stages}

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def read(self) -> Operators:
        for stage in self.estimator.stages:
            if stage.repeated and (self.has_images or stage.group not in ("vision", "projector")):
                self._read_stage(stage)
        self._read_part(
            "", None, sign_outside(self.estimator.stages, self.switches), "*", self.states["", None], 1, False
        )
        rows = tuple(
            Operator(module, group, direction, kind, reads, writes, count, is_again)
            for (module, group, direction, kind, reads, writes, is_again), count in self.rows.items()
        )
        saved = tuple(
            SavedTensor(module, group, size, count, is_again)
            for (module, group, size, is_again), count in self.saved.items()
        )
        is_recorded = self.stand_in is None and _UNCAST not in self.notes
        return Operators(rows, saved, tuple(self.notes), is_recorded, self._has_dropout())

    def _has_dropout(self) -> bool:
        name, own = find_language(self.estimator.source.config)
        switches = {**self.data["usual"].get(name, {}), **read_switches(own)}
        return self.load.phase == "train" and is_on(switches.get("attention_dropout"))

    def _read_stage(self, stage: Stage) -> None:
        last = stage.first + len(stage.layers) - 1
        alike: dict[tuple[str, str, LayerState, Chain], int] = {}
        for number, chain in enumerate(stage.layers, stage.first):
            where = "first" if number == stage.first else "last" if number == last else "*"
            state = self.states.get((stage.path, number), NO_STATE)
            key = (sign_layer(stage, chain, self.switches), where, state, chain)
            alike[key] = alike.get(key, 0) + 1
        is_again = stage.checkpoint and self.load.phase == "train" and self.estimator.recipe.recompute != "none"
        for (signature, where, state, chain), count in alike.items():
            self._read_part(stage.path, chain, signature, where, state, count, is_again)

    def _find_part(self, phase: RecordedPhase, table: str, path: str, signature: str, where: str) -> Any:
        """A recorded part, the nearest one where this one was not recorded."""
        flags, prefix = " images" if self.has_images else "", f"{phase} " if phase else ""
        masked = " masked" if self.attention == "sdpa" and self._is_masked else ""
        cast = f"{prefix}{self.attention} autocast{flags}" if self.is_cast else ""
        parts: dict[str, Any] = self.data[table]
        asked = f"{prefix}{self.attention}{masked}{flags}"
        if self.is_cast and cast not in parts:
            self._note(_UNCAST)
        for key in (
            cast,
            asked,
            f"{prefix}{self.attention}{flags}",
            f"{prefix}{self.attention}",
            f"{prefix}sdpa{flags}",
            f"{prefix}eager{flags}",
            f"{prefix}sdpa",
            f"{prefix}eager",
        ):
            stages = parts.get(key)
            if stages is None:
                continue
            if key not in (asked, cast):
                self._note(f"{asked} was not recorded: {key} is used")
            found = stages.get(path)
            if found is None:
                continue
            kinds = {self.data["signatures"][int(number)]: entry for number, entry in found.items()}
            entry = kinds.get(signature)
            if entry is None:
                apart = {other: self._tell_apart(path, signature, other) for other in kinds}
                nearest = min(kinds, key=lambda other: sum(DISTANCES.get(key, 1) for key in apart[other]))
                entry = kinds[nearest]
                if path and apart[nearest]:
                    self._note(f"layers of {path}: this kind was not recorded; the nearest is used")
                elif "embedding_dropout" in apart[nearest]:
                    self._note("embeddings: recorded only with another dropout setting; the nearest is used")
            return entry.get(where, entry["*"])
        return {} if table == "parts" else None

    def _tell_apart(self, path: str, one: str, other: str) -> list[str]:
        """What one signature has and the other has not, so far as it matters here: switches by name, ops as ""."""
        found = []
        for sign in {*one.split()} ^ {*other.split()}:
            key, is_switch, _ = sign.partition("=")
            is_inside = key == "attention_dropout" and self.attention != "eager"  # a kernel's own
            if not is_switch:
                found.append("")
            elif is_inside or (key.endswith("dropout") and self.load.phase != "train"):
                continue
            elif (key in OUTSIDE) if not path else key != "embedding_dropout":
                found.append(key)
        return found

    @cached_property
    def _is_masked(self) -> bool:
        return bool(list_windows(self.estimator, self.features["keys"]))

    def _read_part(
        self, path: str, chain: Chain | None, signature: str, where: str, state: LayerState, count: int, is_again: bool
    ) -> None:
        phase = self.load.phase
        source, signature = self._find_source(path, chain, signature)
        recorded: dict[str, dict[str, int]] = {phase: self._find_part(phase, "parts", source, signature, where)}
        if phase == "train":
            recorded["flow"] = self._find_part("flow", "parts", source, signature, where)
        self._add_adapters(path, chain, state, count, is_again and state.flows)
        scope = Scope(self.features, list_sizes(self.estimator.stages, chain), self.dtype_bytes)
        if self.stand_in is None:
            modules = [(name, name, scope._replace(module=name)) for name in recorded[phase]]
        else:
            modules = self._borrow(self.stand_in, path, chain, recorded[phase])
        shifted = find_shifted(self.estimator, chain, state.weights, [module for _, module, _ in modules])
        for from_, module, own in modules:
            name = join(f"{path}.*", module) if path else module
            module = module.removeprefix("/")  # a whole path: the name alone says what trains
            group = self._find_group(path, module)
            if from_ not in recorded[phase] or (not self.has_images and group in ("vision", "projector")):
                continue
            number = recorded[phase][from_]
            self._add_rows(number, "f", own, name, group, count)
            if phase != "train" or not self._has_gradient(path, module, state):
                continue
            back = recorded["train" if module in state.weights or module in shifted else "flow"]
            if from_ in back:
                self._add_rows(back[from_], "b", own, name, group, count, is_frozen=back is not recorded["train"])
            if is_again and state.flows:
                self._add_rows(number, "f", own, name, group, count, True)
        for name in _list_experts(chain):
            self._add_experts(path, name, state, count, scope._replace(module=name), is_again)
        if phase == "train" and (state.flows or not path) and self.stand_in is None:
            self._add_saved(path, chain, signature, where, state, count, scope, is_again)

    def _add_experts(self, path: str, name: str, state: LayerState, count: int, scope: Scope, is_again: bool) -> None:
        """What the version of transformers does to routed rows; all that experts do, in a model that was not recorded.

        HF gives all models with experts the same code.
        """
        phase, module = self.load.phase, join(f"{path}.*", name)
        group = self._find_group(path, name)
        ahead = behind = list[Any](self.masks)
        if self.stand_in is not None:
            ahead = [*self._find_experts(phase), *ahead]
            behind = [*self._find_experts("train" if name in state.weights else "flow"), *behind]
        self._add_table(ahead, "f", scope, module, group, count)
        if phase != "train" or not self._has_gradient(path, name, state):
            return
        self._add_table(behind, "b", scope, module, group, count)
        if is_again and state.flows:
            self._add_table(ahead, "f", scope, module, group, count, is_again=True)

    def _find_experts(self, phase: RecordedPhase) -> list[Any]:
        """The operators of recorded experts."""
        kind, path, module = _EXPERTS
        data = load_file(kind)
        if data is None:
            return []
        layers = next(iter(data["parts"][f"{phase} sdpa"][path].values()))
        found: list[object] = data["blocks"][layers["*"][module]]
        return found

    # --- a model that was not recorded --------------------------------------------------------------------------------
    def _find_source(self, path: str, chain: Chain | None, signature: str) -> tuple[str, str]:
        """The path and the signature under which a part was recorded: its own, or the stand-in's."""
        if self.stand_in is None:
            return path, signature
        if chain is None:
            return "", self._list_recorded("")[0]
        if any(op.kind == "product" for op in iterate(chain)):
            self._note(
                f"layers of {path}: what their scans or selections of keys dispatch was not recorded; "
                "they may take far longer"
            )
        found = self.stand_in.find_roles(self._find_own_group(path)).path
        return found, choose_variant(self._list_recorded(found), chain)

    def _find_own_group(self, path: str) -> str:
        return next((stage.group for stage in self.estimator.stages if stage.path == path), "language")

    def _list_recorded(self, path: str) -> list[str]:
        """Signatures that were recorded under a path."""
        numbers = {int(number): None for stages in self.data["parts"].values() for number in stages.get(path, {})}
        return [self.data["signatures"][number] for number in numbers]

    def _borrow(
        self, stand_in: StandIn, path: str, chain: Chain | None, recorded: dict[str, int]
    ) -> list[tuple[str, str, Scope]]:
        """The stand-in's modules, the model's own that get their operators, and the sizes of those."""
        call = find_call(self.load)

        def count_rows(op: Op) -> int:
            return op.rows.count(call, "full") * op.times

        given = Outside(stand_in, self.estimator.stages)
        if chain is not None:
            has_cache = self.load.phase in ("prefill", "decode")
            roles = stand_in.find_roles(self._find_own_group(path))
            found = borrow_layer(roles, chain, self.widths[path], given.size(), count_rows, has_cache)
        else:
            found = borrow_outside(given, recorded, count_rows, self.features["tokens"])
        apart = _list_experts(chain)  # with operators of their own
        return [
            (each.source, each.module, self._make_scope(each, stand_in.places))
            for each in found
            if each.rows and each.module not in apart
        ]

    def _make_scope(self, each: Borrowed, places: str) -> Scope:
        """The features and sizes of a borrowed module; what the stand-in runs over tokens or patches, over its rows."""
        features = {**self.features, "tokens": each.rows, "patches": each.rows}
        if places:
            features |= {places: each.rows, f"{places}##2": each.pairs}
        if each.window and self.load.phase == "decode":  # a full window's cache: what it keeps, and with the new row
            rows, keys = self.load.rows, min(self.features["keys"], each.window)
            features |= {"past": rows * (keys - 1), "pairs": rows * keys, "cached": rows * keys, "keys": keys}
        return Scope(features, each.sizes, self.dtype_bytes, each.source)

    def _has_gradient(self, path: str, module: str, state: LayerState) -> bool:
        if not state.flows or module in state.silent:
            return False
        if path or self._find_group(path, module) not in ("vision", "projector"):
            return True
        names = (*state.weights, *(name for name, _ in state.adapted))
        inside = [name for name in names if self._find_group("", name) in ("vision", "projector")]
        return bool(inside) or any(
            self.states.get((stage.path, number), NO_STATE).flows
            for stage in self.estimator.stages
            for number in range(stage.first, stage.first + len(stage.layers))
            if stage.repeated and stage.group == "vision"
        )

    def _find_group(self, path: str, module: str) -> str:
        """The group of the stage that a module belongs to, or lies next to."""
        best, found = -1, "language"
        asked = (path or module).split(".")
        for stage in self.estimator.stages:
            shared = 0
            for a, b in zip(stage.path.split("."), asked, strict=False):
                if a != b:
                    break
                shared += 1
            if shared > best or (shared == best and stage.group == "language"):
                best, found = shared, stage.group
        return found if best > 0 else "language"

    def _add_adapters(self, path: str, chain: Chain | None, state: LayerState, count: int, is_again: bool) -> None:
        """What PEFT's LoRA adds to a linear module with a frozen base layer."""
        ops = {op.name.removeprefix("/"): op for op in iterate(chain)} if chain is not None else {}
        if chain is None:
            for stage in self.estimator.stages:
                if not stage.repeated:
                    ops |= {join(stage.path, op.name): op for op in iterate(stage.layers[0])}
        is_train = self.load.phase == "train"
        call = find_call(self.load)
        for name, rank in sorted(state.adapted):
            op = ops.get(name.replace("#", "*"))
            if op is None or op.kind != "linear" or op.copies > 1:
                self._note(f"{name}: the operators of its adapter were not recorded")
                continue
            rows = op.rows.count(call, "full") * op.times
            if not rows and not is_train:
                continue
            scope = Scope({"rows": rows}, {"in": op.n_in, "out": op.n_out, "rank": rank}, self.dtype_bytes)
            module = join(f"{path}.*", op.name) if path else name
            group = self._find_group(path, name)
            table = find_adapter_table(self.estimator.formats, self.dtype_bytes)
            for again in (False, True) if is_again else (False,):
                self._add_table(table, "f", scope, module, group, count, is_again=again)
            if not is_train:
                continue
            self._add_table(table, "b", scope, module, group, count)
            texts = ("f*rows*in", "f*rows*rank") if self.casts_adapters else ("x*rows*rank",)
            if self.casts_adapters and self.estimator.formats.autocast:  # brought back to the half-precision format
                texts = ("x*rows*in", "x*rows*rank")
            for text in texts:
                key = (module, group, scope.evaluate(text), is_again)
                self.saved[key] = self.saved.get(key, 0) + count

    def _add_rows(
        self,
        number: int,
        direction: Literal["f", "b"],
        scope: Scope,
        module: str,
        group: str,
        count: int,
        is_again: bool = False,
        *,
        is_frozen: bool = False,
    ) -> None:
        table = self.data["blocks"][number]
        if is_frozen:  # without its weights' gradients a norm's backward pass is another kernel
            table = [[way, kind + "_frozen" * (kind == "norm_backward"), *rest] for way, kind, *rest in table]
        self._add_table(table, direction, scope, module, group, count, is_again=is_again)

    def _add_table(
        self, table: list[Any], direction: Literal["f", "b"], scope: Scope, module: str, group: str, count: int, *,
        is_again: bool = False,
    ) -> None:  # fmt: skip
        for letter, kind, many, reads, writes in table:
            is_sum = isinstance(many, str)  # then the bytes are of all calls together
            calls = (scope.evaluate(many) if is_sum else many) if letter == direction else 0
            if calls <= 0:  # what a loop does between two images, where there is one
                continue
            try:
                moved = [scope.evaluate(text) // (calls if is_sum else 1) for text in (reads, writes)]
            except MissingSizeError as error:
                if scope.lacks_own(str(error)):  # a module that this model does not have
                    continue
                self._note(f"{module}{_MISSING} {error}, so its {kind} operators count no bytes")
                moved = [0, 0]
            if reads.startswith("f") and kind in load_defaults().work.float_share:
                kind += FLOAT
            way: PassDirection = "forward" if letter == "f" else "backward"
            key = (module.replace("#", "*"), group, way, kind, moved[0], moved[1], is_again)
            self.rows[key] = self.rows.get(key, 0) + calls * count * self.calls

    def _add_saved(
        self,
        path: str,
        chain: Chain | None,
        signature: str,
        where: str,
        state: LayerState,
        count: int,
        scope: Scope,
        is_again: bool,
    ) -> None:
        group = self._find_group(path, "")
        number = self._find_part("", "saved", path, signature, where)
        for text, train, flow, many in self.data["kept"][number] if number is not None else ():
            savers = [name for name in (train.split(" ") if train else ()) if name in state.weights]
            savers += [
                name for name in (flow.split(" ") if flow else ()) if name not in state.silent or name in state.weights
            ]
            if not self.casts_adapters:  # an adapter keeps its input itself, else a copy in another format
                adapted = {name for name, _ in state.adapted}
                savers += [name for name in (train.split(" ") if train else ()) if name in adapted]
            if not path:
                savers = [name for name in savers if self._has_gradient("", name, state)]
            if train == flow == "":  # kept by the layer's own code
                savers = [""] if state.flows else []
            if not savers:
                continue
            try:
                first = (train or flow).partition(" ")[0]
                size = scope._replace(module=first).evaluate(text)
            except MissingSizeError:
                continue
            saver = next((name for name in f"{train} {flow}".split(" ") if name in savers), savers[0])
            module = f"{path}.*.{saver}".rstrip(".") if path else saver
            key = (module.replace("#", "*"), group if path else self._find_group("", saver), size, is_again)
            self.saved[key] = self.saved.get(key, 0) + many * count
        if is_again and chain is not None:
            first = next((op for op in iterate(chain) if op.size or op.n_in), None)
            if first is not None:
                rows = first.rows.count(self.load, "full") * first.times
                key = (f"{path}.*", group, rows * (first.size or first.n_in) * self.dtype_bytes, False)
                self.saved[key] = self.saved.get(key, 0) + count
