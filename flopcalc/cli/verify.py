"""`flopcalc verify`: HF's own model is built, run and counted; every row must equal the analytic one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from flopcalc.api import bind
from flopcalc.base.data import describe_install, list_data_files
from flopcalc.base.errors import FlopcalcError, RecipeError, WorkloadError
from flopcalc.base.text_table import format_text
from flopcalc.base.units import parse_size, parse_sizes
from flopcalc.base.vocabulary import PHASES, RECOMPUTE, Recompute, check_word
from flopcalc.cli.command import Command
from flopcalc.cli.options import complete_model
from flopcalc.cli.streams import show_json
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.config import load_config
from flopcalc.core.model.ops import iterate
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.core.spec.aliases import strip_marks
from flopcalc.report.verification import format_case, format_totals

if TYPE_CHECKING:
    from flopcalc.measure.hf.compare import Verdict
    from flopcalc.measure.hf.examples import Example

_SMALL = 2 * 10**9  # parameters that any machine has memory for


@click.command(cls=Command)
@click.argument("first", required=False, shell_complete=complete_model, metavar="[MODEL]")
@click.option(
    "--model-type",
    "--as",
    "types",
    multiple=True,
    metavar="T",
    help="Verify the tiny examples of this type; repeatable. With MODEL: read its config as this type.",
)
@click.option("--config", metavar="PATH", help="Same as MODEL: a preset, a config.json or its folder, at its own size.")
@click.option("--all", "every", is_flag=True, help="Every model type that has an example.")
@click.option("--batch", metavar="N", help="One workload instead of the usual ones: samples (default 1).")
@click.option("--seq", metavar="N", help="Length per sample.")
@click.option("--decoder-seq", metavar="N", help="Encoder-decoders: length of the decoder.")
@click.option("--image-grid", multiple=True, metavar="T,H,W", help="An image per sample, in patches.")
@click.option("--clip", multiple=True, metavar="FRAMES", help="Audio per sample, in the extractor's frames.")
@click.option("--phase", type=click.Choice(PHASES), default="train", show_default=True)
@click.option("--context", metavar="C", help="decode: keys already cached (default 0).")
@click.option("--freeze", multiple=True, metavar="PATTERN", help="Glob of module paths.")
@click.option("--lora", metavar="r=16,targets=q_proj+v_proj", help="LoRA as PEFT applies it.")
@click.option("--recompute", type=click.Choice(RECOMPUTE), help="Gradient checkpointing (default none).")
@click.option("--gradient-checkpointing", is_flag=True, help="Same as --recompute full.")
@click.option(
    "--device", type=click.Choice(("cpu", "meta")), help="meta takes no memory. Default: cpu for tiny examples."
)
@click.option("--json", "as_json", is_flag=True)
def verify(
    first: str | None, types: tuple[str, ...], config: str | None, every: bool, as_json: bool, **options: object
) -> None:
    """Build HF's model, count it with the operator counter, and compare with the analytic count, row by row.

    Needs torch and transformers (the extra `measure`). Exit code 1 when a row differs.

    \b
      flopcalc verify --model-type llama
      flopcalc verify llama-3.1-8b --seq 64
    """
    has_model = config is not None or first is not None
    if sum((bool(types) and not has_model, config is not None, first is not None, every)) != 1 or (
        has_model and len(types) > 1
    ):
        raise FlopcalcError("say what to verify: one of MODEL (or --config MODEL), --model-type T, --all")
    config = first if config is None else config
    try:
        from flopcalc.measure.hf.verify import prepare
    except ImportError as error:
        raise FlopcalcError(f"verify needs {error.name}: {describe_install('measure')}") from None
    prepare()
    found: list[dict[str, object]] = []
    verdicts: list[tuple[str, Verdict | None]] = []
    for name, keys, workload, recipe, example, device in _list_jobs(types, config, every, options):
        label = f"{name} {_format(workload)}{' ' + _format(recipe) if recipe else ''}"
        try:
            verdict: Verdict | None = _run(keys, workload, recipe, example, device)
            problem = None
        except FlopcalcError as error:
            verdict, problem = None, str(error)
        except Exception as error:  # HF's own code: whatever it raises is the answer for this case
            verdict, problem = None, f"{type(error).__name__}: {str(error)[:300]}"
        verdicts.append((label, verdict))
        found.append({"model": name, "workload": workload, "recipe": recipe, **_describe(verdict, problem)})
        if not as_json:
            click.echo(format_case(label, found[-1]))
    summary = _summarize(verdicts)
    is_equal = summary["equal"] == summary["cases"]
    if as_json:
        show_json({"schema": 1, "equal": is_equal, "cases": found, "summary": summary})
    else:
        click.echo(format_totals(summary))
    if not is_equal:
        raise click.exceptions.Exit(1)


def _summarize(verdicts: list[tuple[str, Verdict | None]]) -> dict[str, Any]:
    """How many cases are equal, differ or are not known, and the row that differs most, as a share of its step."""
    known = [(label, verdict) for label, verdict in verdicts if verdict is not None]
    equal = sum(verdict.is_equal for _, verdict in known)
    largest: dict[str, Any] | None = None
    for label, verdict in known:
        total = max(sum(verdict.traced), 1)
        for path, (ours, theirs) in verdict.different.items():
            flops = abs(sum(ours or ()) - sum(theirs or ()))
            if largest is None or flops / total > largest["share"]:
                largest = {"case": label, "module": path, "flops": flops, "share": flops / total}
    return {
        "cases": len(verdicts),
        "equal": equal,
        "different": len(known) - equal,
        "unknown": len(verdicts) - len(known),
        "largest_difference": largest,
    }


def _read_recompute(options: Mapping[str, object]) -> Recompute:
    recompute = options["recompute"]
    if options["gradient_checkpointing"] and recompute not in (None, "full"):
        raise RecipeError(f"--gradient-checkpointing is --recompute full, not {recompute}: give one of them")
    return "full" if options["gradient_checkpointing"] else check_word(recompute or "none", RECOMPUTE, "recompute")


def _list_jobs(types: tuple[str, ...], config: str | None, every: bool, options: dict[str, Any]) -> Any:
    from flopcalc.measure.hf.examples import find_example, list_cases, make_estimator
    from flopcalc.measure.hf.models import find_class

    recipe = make_recipe(freeze=options["freeze"], lora=options["lora"], recompute=_read_recompute(options))
    asked = {key: value for key, value in recipe.to_dict().items() if value and value != "none"}
    workload = _read_workload(options)
    if workload is None and config is None:
        given = [key for key in ("batch", "image_grid", "clip", "context", "freeze", "lora") if options[key]]
        given += ["phase"] if options["phase"] != "train" else []
        given += ["recompute"] if _read_recompute(options) != "none" else []
        if given:
            raise FlopcalcError(f"--{given[0].replace('_', '-')} belongs to one workload: give its --seq too")
    if config is not None:
        mapped = load_config(config, model_type=types[0] if types else None).config
        keys = strip_marks(mapped)
        workload = workload or _read_workload({**options, "seq": "67"})
        assert workload is not None
        example = find_example(keys["model_type"])
        estimator = make_estimator(example, mapped)
        find_class(example.choose_class(estimator.spec.architecture))
        is_text = estimator.vision is None or estimator.has_text_encoder or estimator.has_decoder
        if options["seq"] is None and options["image_grid"] and not is_text:
            workload.pop("seq", None)
        _check_fits(keys["model_type"], [mapped], workload, example)
        _check_same(config, mapped, keys, workload)
        yield config, keys, workload, asked, None, options["device"]
        return
    for name in types or list_data_files("examples"):
        if name not in list_data_files("examples"):
            raise FlopcalcError(f"no example of {name!r} in model_specs/examples: give --config PATH")
        example = find_example(name)
        if every and example.needs and find_spec(example.needs) is None:
            click.echo(f"skipped {name}: needs {example.needs}", err=True)
            continue
        try:
            find_class(example.choose_class(make_estimator(example, example.configs[0]).spec.architecture))
        except FlopcalcError as error:
            if not every:
                raise
            click.echo(f"skipped {name}: {error}", err=True)
            continue
        if workload is not None and len(types) == 1:  # of several types, one that cannot take it is a failed case
            _check_fits(name, example.configs, workload, example)
        for number, keys in enumerate(example.configs):
            label = f"{name}/{'abcdefgh'[number]}"
            cases = [(workload, asked)] if workload else list_cases(example, keys)
            for case, case_recipe in cases:
                yield label, keys, case, case_recipe, example, options["device"] or "cpu"


def _check_fits(
    model_type: str, configs: Sequence[dict[str, object]], workload: dict[str, object], example: Example
) -> None:
    """Sizes that no config of a model type can take are the asker's mistake, not a difference."""
    from flopcalc.measure.hf.compare import make_load
    from flopcalc.measure.hf.examples import make_estimator

    refused: FlopcalcError | None = None
    for keys in configs:
        estimator = make_estimator(example, keys)
        try:
            estimator.estimate(make_load(_complete(workload, estimator)))
            if workload["phase"] == "decode" and not workload.get("context") and _starts_apart(estimator):
                raise WorkloadError("its first token fills what later ones read: give --context C, at least 1")
            return
        except FlopcalcError as error:
            refused = refused or error
    if refused is not None:
        words = str(refused).removeprefix("config ").replace("--audio SECONDS", "--clip FRAMES")
        words = words.replace("--image WxH", "--image-grid T,H,W")
        raise WorkloadError(f"{model_type}: {words}")


def _complete(workload: dict[str, object], estimator: Estimator) -> dict[str, object]:
    is_decoded = estimator.has_decoder and workload["phase"] == "decode"
    return {"decoder_seq": 1, **workload} if is_decoded else workload


def _check_same(model: str, mapped: dict[str, Any], keys: dict[str, Any], workload: dict[str, object]) -> None:
    """Refuse a config that an alias counts as another model than the family's (a draft): HF has only the family's."""
    from flopcalc.measure.hf.compare import make_load

    if mapped == keys:
        return
    ours, plain = map(bind, (mapped, keys))
    counts = [each.estimate(make_load(_complete(workload, each))).by_component() for each in (ours, plain)]
    if counts[0] != counts[1]:
        raise FlopcalcError(
            f"{model}: transformers has no model of {ours.spec.name}, only of {keys['model_type']}, which has other "
            "layers: there is nothing to compare with. `flopcalc explain` shows how each row of it is counted"
        )
    if ours.parameters() != plain.parameters():
        words = (
            f"transformers has no model of {ours.spec.name}: {keys['model_type']} is compared, which has the same "
            "products, but other norms or biases"
        )
        click.echo(format_text(words, "note  ", " " * 6), err=True)


def _starts_apart(estimator: Estimator) -> bool:
    """Whether decoding from no context executes more than the decoding that is counted: cross keys, states."""
    return estimator.has_decoder or any(
        op.part == "ssm" for stage in estimator.stages for chain in stage.kinds for op in iterate(chain)
    )


def _run(
    keys: dict[str, object],
    workload: dict[str, object],
    recipe: dict[str, object],
    example: Example | None,
    device: str | None,
) -> Verdict:
    """One case; where no device was asked for, on meta, or in memory if HF reads values and the model is small."""
    from flopcalc.measure.hf.verify import verify as run

    try:
        return run(keys, workload, recipe, example=example, device=device or "meta")
    except RuntimeError as error:
        if device is not None:
            raise
        if bind(keys).parameters()["total"] > _SMALL:
            words = str(error).partition("\n")[0][:200]
            raise FlopcalcError(f"HF cannot run it on meta ({words}): --device cpu builds it in memory") from None
    return run(keys, workload, recipe, example=example, device="cpu")


def _read_workload(options: dict[str, Any]) -> dict[str, Any] | None:
    if options["seq"] is None and options["decoder_seq"] is None:
        return None
    workload: dict[str, Any] = {"batch": parse_size(options["batch"] or "1", "--batch"), "phase": options["phase"]}
    for key in ("seq", "decoder_seq", "context"):
        if options[key] is not None:
            workload[key] = parse_size(options[key], f"--{key.replace('_', '-')}", 0 if key == "context" else 1)
    if options["image_grid"]:
        workload["images"] = [list(parse_sizes(text, "--image-grid", 3)) for text in options["image_grid"]]
    if options["clip"]:
        workload["clips"] = [parse_size(text, "--clip") for text in options["clip"]]
    return workload


def _format(table: dict[str, object]) -> str:
    return " ".join(f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in table.items())


def _describe(verdict: Verdict | None, problem: str | None) -> dict[str, Any]:
    if verdict is None:
        return {"equal": False, "error": problem}
    return {
        "equal": verdict.is_equal,
        "flops": {"analytic": verdict.ours, "traced": verdict.traced},
        "parameters": {"analytic": verdict.parameters[0], "traced": verdict.parameters[1]},
        "different": {path: {"analytic": a, "traced": b} for path, (a, b) in verdict.different.items()},
        "not_counted": verdict.not_counted,
    }
