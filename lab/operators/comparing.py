"""How far a recorded file lies from a trace of sizes that it was not made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from flopcalc.base.vocabulary import RecordedAttention
from flopcalc.core.workload.workload import Workload
from flopcalc.measure.hf.examples import Example, find_example
from flopcalc.prediction.operators import list_operators
from lab.operators import denoisers
from lab.operators.configs import Json, find_attention, list_variants, resize, set_window
from lab.operators.recording import AUTOCAST, FAILURES
from lab.operators.runs import CACHELESS, Run, make_load, make_workload_of, run, sees_images_alone

Sums = dict[tuple[str, str], list[int]]  # (direction, kind) -> bytes read, bytes written, calls
LIMIT = 0.15  # of --check


def add_up_both(
    example: Example, config: Json, phase: str, attention: str, workload: Json
) -> tuple[Sums, Sums, tuple[str, ...]]:
    """What a trace shows, what is read from the file, and the reader's notes; attention may be "sdpa autocast" too."""
    kind, _, mode = attention.partition(" ")
    recorded: RecordedAttention = "eager" if kind == "eager" else "sdpa"
    return add_up(run(example, config, phase, kind, workload, mode == "autocast"), make_load(workload, phase), recorded)


def add_up(seen: Run, load: Workload, attention: RecordedAttention) -> tuple[Sums, Sums, tuple[str, ...]]:
    """The same for a step that was traced."""
    bytes_ = {"x": 2, "f": 4, "l": 8, "i": 4, "o": 1}
    traced: Sums = defaultdict(lambda: [0, 0, 0])
    for event in seen.trace.events:
        sums = traced[event.direction, event.kind]
        sums[0] += sum(bytes_[letter] * count for letter, count in event.reads)
        sums[1] += sum(bytes_[letter] * count for letter, count in event.writes)
        sums[2] += 1
    read: Sums = defaultdict(lambda: [0, 0, 0])
    found = list_operators(seen.estimator, load, attention)
    for row in found.rows:
        sums = read[row.direction, row.kind]
        sums[0] += row.reads * row.count
        sums[1] += row.writes * row.count
        sums[2] += row.count
    return traced, read, found.notes


def compare(example: Example, config: Json, phase: str, attention: str, workload: Json) -> dict[tuple[str, str], Any]:
    """(direction, kind) -> (bytes and calls traced, the same read), where they differ."""
    traced, read, _ = add_up_both(example, config, phase, attention, workload)
    return {key: (traced[key], read[key]) for key in sorted({*traced, *read}) if traced[key] != read[key]}


def find_gaps(traced: Sums, read: Sums) -> tuple[float, float]:
    """How far all bytes and all calls that are read lie from the traced ones: read over traced, less 1."""
    moved = [sum(reads + writes for reads, writes, _ in table.values()) for table in (traced, read)]
    calls = [sum(count for _, _, count in table.values()) for table in (traced, read)]
    return moved[1] / moved[0] - 1, calls[1] / calls[0] - 1


def check_denoiser(name: str) -> int:
    """As check, of one of diffusers' transformers."""
    wrong = 0
    for configs in denoisers.DENOISERS[name].sets:
        for phase in ("train", "forward"):
            seen = denoisers.run_denoiser(configs[-1], phase, denoisers.CHECKED)
            traced, read, _ = add_up(seen, denoisers.make_load(denoisers.CHECKED, phase), "sdpa")
            gaps = find_gaps(traced, read)
            is_far = max(map(abs, gaps)) > LIMIT
            wrong += is_far
            shown = "equal" if traced == read else "bytes {:+.1%}, calls {:+.1%}".format(*gaps)
            print(f"{name:14} {phase:8} {shown}{' TOO FAR' if is_far else ''}")
    return wrong


def check(model_type: str) -> int:
    """Prints how far what is read lies from a trace of sizes that nothing was recorded from; cases beyond LIMIT."""
    if model_type in denoisers.DENOISERS:
        return check_denoiser(model_type)
    example = find_example(model_type)
    wrong, compared = 0, 0
    variants = list(list_variants(example))
    has_whole = any(is_whole for _, is_whole in variants)
    for configs, is_whole in variants:
        other = set_window(resize(configs[0], 6, 2, 5, 4), 4096)
        for phase, workload in list_checks(example):
            is_cast = model_type in AUTOCAST and (is_whole or not has_whole) and phase in CACHELESS
            cast = (f"{find_attention(model_type)} autocast",) if is_cast else ()
            for attention in ("sdpa", *(("eager",) if is_whole else ()), *cast):
                try:
                    traced, read, notes = add_up_both(example, other, phase, attention, workload)
                except FAILURES as error:
                    print(f"{model_type:14} {phase:8} {attention:13} not run: {str(error)[:90]}")
                    continue
                compared += 1
                gaps = find_gaps(traced, read)
                shown = "equal" if traced == read else "bytes {:+.1%}, calls {:+.1%}".format(*gaps)
                if notes:  # another recording: it says nothing of this one
                    shown += f" ({notes[0]})"
                elif max(map(abs, gaps)) > LIMIT:
                    wrong += 1
                    shown += " TOO FAR"
                images = "images" if "images" in workload else ""
                print(f"{model_type:14} {phase:8} {attention:13} {images:6} {shown}")
    if not compared:
        print(f"{model_type:14} nothing was compared: is there model_specs/examples/{model_type}.toml?")
    return wrong if compared else 1


def list_checks(example: Example) -> Iterator[tuple[str, Json]]:
    if example.decoder_seq or example.clips:
        for phase, batch in (("train", 3), ("forward", 2)):
            yield phase, make_workload_of(example, batch, 37, 17)
    elif "text" not in example.skip and not sees_images_alone(example):
        yield "train", {"batch": 3, "seq": 37}
        yield "forward", {"batch": 2, "seq": 23}
        yield "prefill", {"batch": 4, "seq": 31}
        yield "decode", {"batch": 4, "seq": 1, "context": 29}
    for images in example.images[:1]:
        length = {"seq": images["seq"] + 5} if "seq" in images else {}
        yield "train", {**images, "batch": 3, **length}
        yield "forward", {**images, "batch": 3, **length}
