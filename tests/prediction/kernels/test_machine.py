"""A predictor's file: what a fit may write is read, and what is broken is refused with its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_products import make_product

from flopcalc import bind
from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.base.vocabulary import PassDirection
from flopcalc.hardware.tiles import ProductSize
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.kernels.constants import load_predictor
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.kernels.memory_bound import MOST_ROWS, count_rows, find_size, name_shape
from flopcalc.prediction.kernels.products import measure_narrow, turn_narrow
from flopcalc.prediction.work import MemoryCall

Json = dict[str, Any]
Keep = Callable[..., Path]
AGAIN = "; `flopcalc calibrate --predictor` makes it again"


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a predictor of a device into the user's folder; its path."""
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    (tmp_path / "predictors").mkdir()

    def write(data: Any, device: str = "h200-sxm") -> Path:
        path = tmp_path / "predictors" / f"{device}.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        load_predictor.cache_clear()
        return path

    yield write
    load_predictor.cache_clear()


def _change(place: tuple[str | int, ...], value: Any) -> Json:
    """The shipped predictor with another value in one place."""
    data: Any = json.loads((Path(find_data_dir()) / "predictors" / "h200-sxm.json").read_text())
    inside = data
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    return data  # type: ignore[no-any-return]


CAUSAL = ("attention", "cudnn", "backward/causal/128")


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        (("attention",), {}, "attention: {} lacks entries"),
        (("attention",), None, "attention: None is no mapping"),
        (("attention", "flash"), None, "attention.flash: None is no mapping"),
        (("attention",), {"flash": {}}, "attention: {'flash': {}} lacks entries"),
        (("attention", "cudnn", "forward/causal/x"), [1, 1, 1, 1], "attention.cudnn: 'forward/causal/x' unknown"),
        (CAUSAL, [1, 1, 1], "attention.cudnn.backward/causal/128: a list of 3, not of 4"),
        (CAUSAL, [0, 0, 0, 0], "attention.cudnn.backward/causal/128: [0, 0, 0, 0] is 0 throughout"),
        ((*CAUSAL, 2), -1e-12, "attention.cudnn.backward/causal/128[2]: -1e-12 is no number of 0 or more"),
        (("compiled",), {}, "compiled: moved, launch_s missing"),
        (("compiled",), None, "compiled: None is no mapping"),
        (("compiled", "moved"), "1", "compiled.moved: '1' is no number of 0 or more"),
        (("error",), {}, "error: device, host, late, compiled missing"),
        (("error",), None, "error: None is no mapping"),
        (("error", "device"), -1, "error.device: -1 is no number of 0 or more"),
        (("error", "late"), True, "error.late: True is no number of 0 or more"),
        (("power",), {}, "power: {} is no list"),
        (("power",), None, "power: None is no list"),
        (("power",), [0.2, 0.7, 1], "power: a list of 3, not of 2"),
        (("provenance",), {}, "provenance: device_id missing"),
        (("provenance",), None, "provenance: None is no mapping"),
        (("provenance", "device_id"), 5, "provenance.device_id: 5 is no text"),
        (("linear",), None, "linear: None is no mapping"),
        (("linear", "cat"), [1e-6] * 10, "linear.cat: a list of 10, not of 2"),
        (("optimizer", "adamw"), [0, 0], "optimizer.adamw: a list of 2, not of 3"),
        (("gaps", "train"), None, "gaps.train: None is no number of 0 or more"),
        (("products",), [], "products: [] is no mapping"),
        (("products", "shape"), [1.0, 2.0, 3.0], "products.shape: a list of 3, not of 9"),
        (("products", "shape"), math.nan, "products.shape: nan is no list"),
        (("products", "shape", 0), 0, "products.shape[0]: 0 is no positive number"),
        (("products", "shape", 1), math.nan, "products.shape[1]: nan is no positive number"),
        (("products", "shape", 6), math.inf, "products.shape[6]: inf is no positive number"),
        (("products", "shape", 8), 0.4, "products.shape[8]: 0.4 is no number of 1 or more"),
        (("products", "residuals", 3, 1), 0, "products.residuals[3][1]: 0 is no number of 1 or more"),
        (("products", "residuals", 3, 0), [], "products.residuals[3][0]: [] is no text"),
        (("products", "unaligned", "odd"), {}, "products.unaligned: 'odd' unknown"),
        (("products", "unaligned", "4"), {"wgrad": 0}, "products.unaligned.4.wgrad: 0 is no positive number"),
        (("products", "grouped"), {"forward": [1] * 6}, "products.grouped: dgrad, wgrad missing"),
        (("products", "grouped", "wgrad", 5), 0, "products.grouped.wgrad[5]: 0 is no positive number"),
        (("products", "patches"), None, "products.patches: None is no mapping"),
        (("moved", "copy"), [], "moved.copy: [] is no curve of rising sizes"),
        (("moved", "copy"), [[8, 1.0], [8, 2.0]], "moved.copy: [[8, 1.0], [8, 2.0]] is no curve of rising sizes"),
        (("moved", "copy", 0), 8, "moved.copy[0]: 8 is no list"),
        (("moved", "copy", 0, 1), 0.0, "moved.copy[0][1]: 0.0 is no positive number"),
        (("host", "train"), "a", "host.train: 'a' is no list"),
        (("host", "units", "view"), -1, "host.units.view: -1 is no number of 0 or more"),
        (("host", "types", "llama"), [], "host.types.llama: [] is no mapping"),
        (("host", "types", "llama", "train", 1), math.nan, "host.types.llama.train[1]: nan is no finite number"),
        (("probe_s",), None, "probe_s: None is no mapping"),
        (("probe_s", "train"), 10**400, "probe_s.train: 1" + "0" * 56 + "… is no positive number up to 1e+24"),
    ],
)
def test_a_broken_part_is_named(place: tuple[str | int, ...], value: Any, fault: str, keep: Keep) -> None:
    path = keep(_change(place, value))
    with pytest.raises(SpecError) as caught:
        Machine("h200")
    assert str(caught.value) == f"{path}: {fault}{AGAIN}"


def test_a_missing_part_of_the_whole_is_named(keep: Keep) -> None:
    data = _change(("power",), None)
    del data["power"], data["gaps"]
    path = keep(data)
    with pytest.raises(SpecError) as caught:
        Machine("h200")
    assert str(caught.value) == f"{path}: gaps, power missing{AGAIN}"


def test_a_file_too_deep_to_read_is_named(keep: Keep) -> None:
    path = keep("[" * 100_000)
    with pytest.raises(SpecError, match=r"not valid JSON: .*makes it again") as caught:
        Machine("h200")
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("products", "patches"), {}),  # no convolution was profiled
        (("products", "unaligned"), {}),
        (("linear",), {}),
        (("linear", "cat"), [0.0, 0.0]),
        (("optimizer",), {"adamw": [0.0, 0.0, 3.7e-13]}),
        (("moved",), {"pointwise_strided": [[1024, 1.768e-06]]}),
        (("compiled",), {"moved": 1.0, "launch_s": 0.0}),  # no compiled step was measured
        (("power",), [1.0, 0.01]),
        (("host", "types"), {}),
        (("host", "types", "llama"), {"train": [0.0, -0.1]}),  # of steps that tell the two badly
        (("host", "again"), [0.0, 0.0]),
        (("host", "decode"), [0.0, 1.2e-05]),
        (("attention",), {"flash": {"forward/decode/128": [6e-6, 0.0, 2e-12, 0.0]}}),
        (("more",), None),  # what is not read
        (("provenance", "commit"), None),
    ],
)
def test_what_a_fit_may_leave_is_read(place: tuple[str | int, ...], value: Any, keep: Keep) -> None:
    data = _change(place, value)
    keep(data)
    machine = Machine("h200")
    assert machine.is_measured
    assert machine.constants == {**data, "is_own": True}


@pytest.mark.parametrize("part", ["products patches", "attention dropout"])
def test_a_file_of_before_is_read(part: str, keep: Keep) -> None:
    data = _change(("more",), None)
    if part == "products patches":
        del data["products"]["patches"]
    else:
        for kernel, table in data["attention"].items():
            data["attention"][kernel] = {name: value for name, value in table.items() if "/dropout/" not in name}
    keep(data)
    assert Machine("h200").constants == {**data, "is_own": True}


def test_a_predictor_of_another_device_is_refused(keep: Keep) -> None:
    shipped = _change(("more",), None)
    path = keep(shipped, "h100-sxm")
    with pytest.raises(SpecError) as caught:
        Machine("h100-sxm")
    assert str(caught.value) == (
        f"{path}: was measured on 'h200-sxm', not on 'h100-sxm': remove it, or run `flopcalc calibrate --predictor` on "
        "'h100-sxm'"
    )
    assert Machine("h200").is_measured


@pytest.mark.parametrize(
    ("device", "share"),
    [
        ("a100-pcie-40gb", 0.83),
        ("a100-pcie-80gb", 0.83),
        ("a10", 0.72),
        ("a40", 0.72),
        ("h100-pcie", 0.72),
        ("tpu-v4", 0.82),
    ],
)
def test_share_of_the_peak_on_a_device_that_was_not_measured(device: str, share: float) -> None:
    machine = Machine(device)
    assert machine.shape.rate == pytest.approx(share * machine.peak, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "reads", "writes"),
    [("fp8", 4, 2), ("mxfp8", 2, 2 * 33 / 32), ("nvfp4", 2, 2 * 9 / 16), ("mxfp4", 2, 17 / 16)],
)
def test_casts_move_activations_in_two_copies_and_no_weights(kind: str, reads: float, writes: float) -> None:
    machine = Machine("b200-sxm", kind)
    rows, n, k = 8192, 4096, 14336
    for direction, numbers in (("forward", rows * k), ("dgrad", rows * n)):
        expected = machine.time_moved(
            MemoryCall("x", "language", direction, "pointwise", float(reads * numbers), float(writes * numbers))
        )
        assert machine.time_cast(make_product(direction, rows, n, k, module="x")) == expected
    assert machine.time_cast(make_product("wgrad", rows, n, k, module="x")).seconds == 0


def test_fused_attention_reads_the_keys_that_are_selected() -> None:
    estimator = bind("deepseek-v4-flash")
    load = estimator(1, 4096).terms[0][1]
    for execution, keys in (("fused", {127, 510, 142}), ("eager", {4096, 5120, 4128})):
        work = make_work(estimator, load, optimizer="adamw", dtype_bytes=2, kernel="cudnn", execution=execution)
        assert {call.keys for call in work.attention} == keys


@pytest.mark.parametrize(
    ("kind", "reads", "writes", "name", "size"),
    [
        ("reduce", 62e6, 62e6 / 128, "reduce_short", 62e6 / 512),  # a mean over each head, in fp32
        ("reduce", 31e6, 256, "reduce_narrow", 31e6 / 256),  # the gradient of a norm over heads
        ("reduce", 31e6, 4608, "reduce", 31e6 + 4608),  # and of one over the whole width
        ("reduce", 185e6, 31e6, "reduce_few", 216e6),  # over the experts of each token
        ("reduce", 1e5, 256, "reduce", 1e5 + 256),
        ("reduce", 1e9, 0, "reduce", 1e9),
        ("sort", 320e3, 640e3, "sort_whole", 960e3),
        ("sort", 1.9e6, 480e3, "sort_top", 2.38e6),
        ("sort", 160e3, 288, "sort", 160288),  # a count of each expert's rows
        ("sort", 8192, 65536, "sort", 73728),  # a running sum of flags
        ("copy_strided", 31e6, 185e6, "copy_strided_spread", 216e6),
        ("copy_strided", 31e6, 31e6, "copy_strided", 62e6),
        ("pointwise", 31e6, 31e6, "pointwise", 62e6),
    ],
)
def test_bytes_tell_the_shape_of_a_call(kind: str, reads: float, writes: float, name: str, size: float) -> None:
    assert name_shape(kind, reads, writes) == name
    assert find_size(name, reads, writes) == pytest.approx(size)


@pytest.mark.parametrize(
    ("kind", "direction", "reads", "writes", "rows"),
    [
        ("norm", "forward", 2 * 50_000 * 384 + 4 * 384, 2 * 50_000 * 384 + 4 * 50_000, 50_000 - 384),
        ("norm_backward", "backward", 4 * 50_000 * 384 + 4 * 384 + 4 * 50_000, 2 * 50_000 * 384 + 4 * 384, 49_616),
        ("norm_backward_frozen", "backward", 4 * 50_000 * 384 + 4 * 384 + 4 * 50_000, 2 * 50_000 * 384, 0),
        ("reduce", "backward", 2 * 50_000 * 768, 2 * 768, 50_000),  # a bias's gradient
        ("pointwise", "backward", 2 * 50_000 * 384, 2 * 50_000 * 384, 0),
    ],
)
def test_rows_bound_norms_and_sums_of_narrow_layers(
    kind: str, direction: PassDirection, reads: float, writes: float, rows: float
) -> None:
    assert count_rows(kind, reads, writes) == rows
    machine = Machine("h200", "bf16", load_predictor("h200-sxm"))
    found = machine.time_moved(MemoryCall("", "language", direction, kind, reads, writes)).seconds
    start, per_row, per_byte = load_defaults().work.row_s.get(kind, (0.0, 0.0, 0.0))
    least = start + rows * per_row + (reads + writes) * per_byte
    assert found == pytest.approx(least) if rows else found > least


def test_seconds_of_rows_are_those_that_were_measured() -> None:
    """An H200's rows of whole blocks, within a grid: the shipped numbers hold them within 20 %."""
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "row_calls.json"
    calls = [call for call in json.loads(path.read_text())["calls"] if call["bytes_each"] == 2]
    calls = [call for call in calls if call["width"] >= 384 and not call["width"] % 128]
    assert len(calls) == 144
    for call in calls:
        rows = count_rows(call["kind"], call["reads"], call["writes"])
        if rows <= MOST_ROWS:
            start, per_row, per_byte = load_defaults().work.row_s[call["kind"]]
            found = start + rows * per_row + (call["reads"] + call["writes"]) * per_byte
            assert found == pytest.approx(call["seconds"], rel=0.2)


@pytest.mark.parametrize(
    ("direction", "n", "k", "form", "flops"),
    [
        ("forward", 8, 4096, "down", 2 * 5000 * 4096 * 32),  # the first layer of an adapter, then its gradients
        ("dgrad", 8, 4096, "up", 2 * 5000 * 4096 * 8),
        ("wgrad", 8, 4096, "grad", 2 * 5000 * 4096 * 32),
        ("forward", 4096, 40, "up", 2 * 5000 * 4096 * 40),  # the second
        ("dgrad", 4096, 40, "down", 2 * 5000 * 4096 * 64),
        ("wgrad", 4096, 40, "down", 2 * 5000 * 4096 * 64),
    ],
)
def test_adapters_have_forms(direction: str, n: int, k: int, form: str, flops: int) -> None:
    found, sizes = turn_narrow(ProductSize(direction, 5000, n, k))
    assert found == form
    assert measure_narrow(found, *sizes) == (4 * (5000 * n + 5000 * k + n * k), flops)


def test_adapters_are_timed_by_form() -> None:
    """A calibration of an older version has no forms: its plain products in float32 stand for them."""
    shipped = load_predictor("h200-sxm")
    assert shipped is not None
    product = make_product("forward", 5000, 8, 4096, format="fp32")
    start, per_byte, per_flop = shipped["products"]["adapters"]["fp32 down"]
    moved, flops = measure_narrow("down", 5000, 4096, 8)
    machine = Machine("h200-sxm", "bf16", shipped)
    assert machine.time_product(product).seconds == pytest.approx(start + per_byte * moved + per_flop * flops)
    older: Any = {name: value for name, value in shipped["products"].items() if name != "adapters"}
    before = Machine("h200-sxm", "bf16", {**shipped, "products": older}).time_product(product).seconds
    assert before > machine.time_product(product).seconds
    assert not machine.is_narrow(product._replace(format=""))
