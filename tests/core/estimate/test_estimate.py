"""Estimates of tiny models against totals built from masks cell by cell; breakdowns, arithmetic and notes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from flopcalc import ConfigError, Estimate, FlopcalcError, WorkloadError, bind, estimate_flops
from flopcalc.base.data import list_data_files
from flopcalc.base.units import format_flops
from flopcalc.base.vocabulary import CONVENTIONS
from flopcalc.core.workload.workload import Workload

D, FF, HEADS, KV, HD, VOCAB, LAYERS = 24, 40, 4, 2, 8, 50, 4
TEXT: dict[str, Any] = {
    "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": HD, "vocab_size": VOCAB,
}  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TEXT}
# window per layer (0: none), by hand: Mistral's on all, Gemma-3's on all but every third.
MODELS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "llama": (LLAMA, [0, 0, 0, 0]),
    "mistral": ({"model_type": "mistral", **TEXT, "sliding_window": 5}, [5, 5, 5, 5]),
    "gemma3": ({"model_type": "gemma3_text", **TEXT, "sliding_window": 3, "sliding_window_pattern": 3}, [3, 3, 0, 3]),
    "gemma3 by layer_types": (
        {
            "model_type": "gemma3_text",
            **TEXT,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
        [0, 4, 0, 4],
    ),
}
VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 20, "num_heads": 4, "patch_size": 4, "window_size": 16,
    "fullatt_block_indexes": [1], "out_hidden_size": D, "in_channels": 3, "temporal_patch_size": 2,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": VISION,
}


def count_pairs(document: int, window: int) -> int:
    """Cells of one document's causal, windowed mask."""
    return sum(q >= k and (not window or q - k < window) for q in range(document) for k in range(document))


def text_forward(documents: list[int], windows: list[int], logits: int, pairs: list[int] | None = None) -> int:
    """Forward FLOPs product by product; `pairs` per layer, else from the documents' masks."""
    tokens = sum(documents)
    total = 0
    for number, window in enumerate(windows):
        for n_in, n_out in ((D, HEADS * HD), (D, KV * HD), (D, KV * HD), (HEADS * HD, D), (D, FF), (D, FF), (FF, D)):
            total += 2 * tokens * n_in * n_out
        cells = pairs[number] if pairs else sum(count_pairs(document, window) for document in documents)
        total += 2 * HEADS * HD * cells * 2  # scores and values
    return total + 2 * logits * D * VOCAB


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seq", [1, 3, 5, 6, 17])
def test_plain_batches(name: str, seq: int) -> None:
    config, windows = MODELS[name]
    estimate = bind(config)(3, seq)
    expected = text_forward([seq] * 3, windows, 3 * seq)
    assert estimate.forward == expected
    assert estimate.backward == 2 * expected
    assert estimate.total == 3 * expected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("documents", [[7], [1, 1, 2], [9, 4, 12]])
def test_packed_documents(name: str, documents: list[int]) -> None:
    config, windows = MODELS[name]
    expected = text_forward(documents, windows, sum(documents))
    assert bind(config)(lengths=documents, phase="forward").total == expected
    marks = [0, *itertools.accumulate(documents)]
    batch = {"input_ids": [[0] * sum(documents)], "cu_seqlens": marks}
    assert bind(config)(batch=batch, phase="forward").total == expected


@pytest.mark.parametrize("name", MODELS)
def test_padded_rows(name: str) -> None:
    config, windows = MODELS[name]
    mask = [[1] * 9 + [0] * 4, [0] * 10 + [1] * 3, [1] * 13]
    estimate = bind(config)(batch={"input_ids": [[0] * 13] * 3, "attention_mask": mask})
    expected = text_forward([9, 3, 13], windows, 25)
    assert estimate.forward == expected
    full = [3 * 13 * 13] * LAYERS
    assert estimate.total_under("full") == 3 * text_forward([13] * 3, windows, 39, full)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("new", "context"), [(1, 0), (1, 9), (4, 2), (6, 0)])
def test_decode(name: str, new: int, context: int) -> None:
    config, windows = MODELS[name]
    estimate = bind(config)(2, new, phase="decode", context=context)
    pairs = [
        2 * sum(min(context + j, window) if window else context + j for j in range(1, new + 1)) for window in windows
    ]
    assert estimate.total == estimate.forward == text_forward([new] * 2, windows, 2 * new, pairs)
    # Token by token is the same work as all at once.
    steps = [bind(config)(2, 1, phase="decode", context=context + j) for j in range(new)]
    assert sum(step.total for step in steps) == estimate.total


def test_prefill_gives_logits_for_the_last_position() -> None:
    assert bind(LLAMA)(3, 7, phase="prefill").total == text_forward([7] * 3, [0] * 4, 3)


def vision_cells(grid: tuple[int, int, int], side: int | None) -> int:
    cells = list(itertools.product(*map(range, grid)))
    homes = [(t, y // side, x // side) if side else (t,) for t, y, x in cells]
    return sum(a == b for a in homes for b in homes)


# windows of 16 pixels = 4 patches; 6 and 10 leave ragged edges
@pytest.mark.parametrize("grids", [[(1, 4, 4)], [(1, 6, 10)], [(2, 6, 4), (1, 2, 2)], [(1, 2, 14), (3, 8, 8)]])
def test_qwen2_5_vl(grids: list[tuple[int, int, int]]) -> None:
    patches = sum(t * h * w for t, h, w in grids)
    merged = patches // 4
    tower = 2 * patches * (3 * 2 * 4 * 4) * 32
    for layer in range(3):
        side = None if layer == 1 else 4
        cells = sum(vision_cells(grid, side) for grid in grids)
        tower += 2 * patches * (32 * 96 + 32 * 32 + 3 * 32 * 20) + 4 * 32 * cells
    merger = 2 * merged * (128 * 128 + 128 * D)
    text = merged + 6
    estimate = bind(QWEN)(1, text, image_grid_thw=grids)
    parts = estimate.by_component()
    assert parts["vision"][0] == tower
    assert parts["projector"][0] == merger
    assert estimate.forward == tower + merger + text_forward([text], [0] * 4, text)
    # The patch embedding owes no gradient to the pixels; everything after it owes both.
    assert estimate.backward == 2 * estimate.forward - 2 * patches * (3 * 2 * 4 * 4) * 32
    assert bind(QWEN)(1, text, video_grid_thw=grids).total == estimate.total
    assert bind(QWEN)(1, 6).by_component()["vision"] == (0, 0, 0, 0)


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_merge_sizes(merge: int) -> None:
    side = 16 // merge // 4 * merge  # HF: windows of so many merged patches
    grid = (1, 6, 18)
    config = {**QWEN, "vision_config": {**VISION, "spatial_merge_size": merge}}
    estimate = bind(config)(1, 200, image_grid_thw=[grid])
    attention = {row.path: row for row in estimate.by_module(per_layer=True)}
    assert attention["model.visual.blocks.0.attn"].forward == 4 * 32 * vision_cells(grid, side)
    assert attention["model.visual.blocks.1.attn"].forward == 4 * 32 * vision_cells(grid, None)
    assert estimate.to_dict()["workload"]["visual_tokens"] == 6 * 18 // merge**2


# --- breakdowns -------------------------------------------------------------------------------------------------------
def test_by_module_depths() -> None:
    estimate = bind(LLAMA)(1, 8)
    assert [row.path for row in estimate.by_module(1)] == ["model", "lm_head"]
    assert [(row.path, row.kind, row.copies) for row in estimate.by_module(3)] == [
        ("model.embed_tokens", "embed", 1),
        ("model.layers.*", "module", 4),
        ("model.norm", "norm", 1),
        ("lm_head", "linear", 1),
    ]
    assert len(estimate.by_module(3, per_layer=True)) == 7
    for depth in (0, -1, 1.5, True, "2"):
        with pytest.raises(WorkloadError, match="depth must be"):
            estimate.by_module(depth)  # type: ignore[arg-type]


def test_kinds() -> None:
    kinds = bind(QWEN)(1, 8, image_grid_thw=[[1, 4, 4]]).by_kind()
    assert {name for name, sums in kinds.items() if any(sums)} == {"linear", "conv", "attend"}


# --- arithmetic -------------------------------------------------------------------------------------------------------
def test_sum_and_product() -> None:
    estimator = bind(LLAMA)
    one, other = estimator(1, 8), estimator(2, 5)
    both = one + other
    assert (both.forward, both.backward) == (one.forward + other.forward, one.backward + other.backward)
    assert both.tokens == 18
    assert both.totals == {name: one.totals[name] + other.totals[name] for name in CONVENTIONS}
    assert both.parameters == one.parameters
    assert sum(row.parameters for row in both.by_module()) == one.parameters["total"]
    assert both.to_dict()["workload"]["layout"] == "unpadded"
    assert (both + estimator(lengths=[3, 4])).to_dict()["workload"]["layout"] == "mixed"
    assert one + bind(LLAMA)(1, 8) == one * 2
    assert (one + bind(LLAMA)(1, 8)).parameters == one.parameters
    triple = one * 3
    assert triple == 3 * one
    assert (triple.forward, triple.total, triple.tokens) == (3 * one.forward, 3 * one.total, 24)
    assert triple.total == (one + one + one).total
    assert triple.parameters == one.parameters


def test_estimates_of_two_models_add_their_parameters() -> None:
    small, large = bind(LLAMA), bind({**LLAMA, "num_hidden_layers": 5})
    both = small(1, 4) + large(1, 4)
    assert both.parameters["total"] == small.parameters()["total"] + large.parameters()["total"]
    assert sum(row.parameters for row in both.by_module()) == both.parameters["total"]


def test_arithmetic_that_means_nothing() -> None:
    one = bind(LLAMA)(1, 8)
    with pytest.raises(FlopcalcError, match="cannot add FLOPs of convention full to model"):
        one + bind(LLAMA, convention="full")(1, 8)
    for times in (0, -1):
        with pytest.raises(FlopcalcError, match="at least 1"):
            one * times
    for other in (1.5, "2", None):
        with pytest.raises(TypeError):
            one * other  # type: ignore[operator]
    with pytest.raises(TypeError):
        one + 1  # type: ignore[operator]


def test_equality_hash_repr_html() -> None:
    one, same, other = bind(LLAMA)(1, 8), bind(LLAMA)(1, 8), bind(LLAMA)(1, 9)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != 5
    assert repr(one).startswith("Estimate(")
    assert "1 x 8 train" in repr(one)
    assert "x 2" in repr(one * 2)
    assert "and 1 more" in repr(one + other)
    html = one._repr_html_()
    assert html.startswith("<table>")
    assert "attention_scores" in html


# --- notes and limits -------------------------------------------------------------------------------------------------
def test_learned_positions_end_and_rotary_ones_are_noted() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 9}
    assert bind(gpt2)(1, 16).total > 0
    assert bind(gpt2)(lengths=[16, 16]).total > 0  # each document starts again
    for arguments in ({"seq_len": 17}, {"lengths": [3, 17]}, {"seq_len": 1, "phase": "decode", "context": 16}):
        with pytest.raises(WorkloadError, match="17 is beyond the 16 positions"):
            bind(gpt2)(**arguments)
    rotary = bind({**LLAMA, "max_position_embeddings": 16})
    assert rotary(1, 16).notes == []
    assert rotary(1, 17).notes == ["length 17 is beyond max_position_embeddings = 16"]


def test_notes_on_images_and_recomputation() -> None:
    assert 'images=["1024x768"]' in bind(QWEN)(1, 8).notes[0]
    assert bind(QWEN)(1, 8, image_grid_thw=[[1, 4, 4]]).notes == []
    assert bind(QWEN)(1, 1, phase="decode").notes == []
    assert bind(QWEN)(1, 8, phase="decode", context=1).notes == []
    estimate = bind(LLAMA, recipe={"recompute": "full"})(1, 8)
    again = bind(LLAMA, recipe={"recompute": "full"}, convention="hardware")(1, 8).recompute
    assert again > 0
    assert any(f"({again:,})" in note for note in estimate.notes)
    assert any(
        "nothing is recomputed" in note
        for note in bind(LLAMA, recipe={"recompute": "full"})(1, 8, phase="forward").notes
    )


@pytest.mark.parametrize(
    ("word", "recipe"), [("recomputation", {"recompute": "full"}), ("clipping", {"clipping": "hooks"})]
)
def test_notes_are_of_the_whole_step(word: str, recipe: dict[str, str]) -> None:
    """What convention model leaves out is said for all micro-batches together, also where they differ."""
    counted, executed = (bind(LLAMA, recipe=recipe, convention=convention) for convention in ("model", "hardware"))
    cases = [
        (counted(2, 16), executed(2, 16)),
        (8 * counted(2, 16), 8 * executed(2, 16)),
        (3 * counted(2, 16) + counted(1, 7), 3 * executed(2, 16) + executed(1, 7)),
    ]
    for needed, run in cases:
        extra = run.recompute + run.clipping
        notes = [note for note in needed.notes if f"{word} would add" in note]
        assert len(notes) == 1
        assert f"({extra:,})" in notes[0]
        assert not any("would add" in note for note in run.notes)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("recompute", ["full", "full-reentrant"])
def test_a_frozen_tower_under_checkpointing_is_noted(recompute: str, convention: str) -> None:
    def note(times: int, **recipe: Any) -> list[str]:
        estimate = bind(QWEN, recipe={"recompute": recompute, **recipe}, convention=convention)
        found = times * estimate(1, 8, image_grid_thw=[[1, 4, 4]])
        return [each for each in found.notes if "frozen vision tower" in each]

    arguments: dict[str, Any] = {"image_grid_thw": [[1, 4, 4]]}
    frozen = bind(QWEN, recipe={"recompute": recompute, "freeze": "vision"}, convention="hardware")(1, 8, **arguments)
    vision = frozen.by_component()["vision"]
    # Nothing in the tower trains: its whole backward pass and what it recomputes is for nothing.
    extra = vision.backward + vision.recompute
    assert vision.backward > 0
    for times in (1, 8):
        (text,) = note(times, freeze="vision")
        assert f": {format_flops(times * extra)}, {100 * extra / frozen.total:.1f} % of the FLOPs" in text
        assert "disable_input_require_grads()" in text
    assert note(1) == []
    assert note(1, freeze="model.visual.blocks.0") == []
    assert bind(QWEN, recipe={"freeze": "vision"}).count_hooks(Workload(1, 8, grids=((1, 4, 4),))) == {}


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        (LLAMA, {"seq_len": 4096}, "give seq_len=1 and context=4096"),
        (LLAMA, {"seq_len": 4096, "context": 1}, None),
        (LLAMA, {"seq_len": 1}, None),
        (LLAMA, {"context": 4096}, None),
        ("t5-v1.1-xl", {"seq_len": 16, "decoder_seq_len": 32}, "give decoder_seq_len=1 and context=32"),
    ],
)
def test_many_new_tokens_after_an_empty_cache_are_noted(config: Any, sizes: dict[str, int], words: str | None) -> None:
    notes = [note for note in bind(config)(1, **sizes, phase="decode").notes if "empty cache" in note]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_bind_says_what_it_does_not_know() -> None:
    with pytest.raises(FlopcalcError, match="Known: model, full, hardware"):
        bind(LLAMA, convention="half")
    with pytest.raises(FlopcalcError, match="Known: auto, eager"):
        bind(LLAMA, attention_kernel="triton")
    with pytest.raises(FlopcalcError, match="unknown"):
        bind(LLAMA, device="h2000")
    with pytest.raises(ConfigError):
        estimate_flops("no-such-model", seq_len=5)


def test_a_device_chooses_the_kernel() -> None:
    assert bind(LLAMA, device="h200").attention_kernel in ("flash", "cudnn")
    assert bind(LLAMA, device="v100s").attention_kernel == "efficient"
    assert bind(LLAMA, device="v100s", attention_kernel="eager").attention_kernel == "eager"
    assert bind(LLAMA).attention_kernel == "flash"


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_to_dict_is_json(convention: str) -> None:
    estimate = bind(QWEN, recipe={"recompute": "full", "freeze": "vision"}, convention=convention)(
        1, 8, image_grid_thw=[[1, 4, 4]]
    )
    shown = estimate.to_dict()
    assert json.loads(json.dumps(shown)) == shown
    for rows in (shown["components"], shown["modules"]):
        assert sum(row["forward"] for row in rows) == estimate.forward
        assert sum(row["forward"] + row["backward"] for row in rows) == estimate.total


def test_estimate_takes_a_workload_as_it_is() -> None:
    load = Workload(2, 9, (3, 9), "padded", "forward")
    estimate = bind(LLAMA).estimate(load, ("a note",))
    assert isinstance(estimate, Estimate)
    assert estimate.tokens == 12
    assert estimate.notes == ["a note"]


def test_rows_per_layer_come_in_the_order_of_the_model() -> None:
    """Layers that count alike are folded inside; per layer they stand in their own order again."""
    rows = bind("gemma-2-2b")(1, 128).by_module(per_layer=True)
    layers = [int(row.path.split(".")[2]) for row in rows if row.path.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert rows[0].path == "model.embed_tokens"
    assert rows[-1].path == "lm_head"


def test_sum_of_estimates() -> None:
    bound = bind("llama-3.2-1b")
    parts = [bound(1, length) for length in (128, 256)]
    assert sum(parts).total == parts[0].total + parts[1].total


def test_feature_layer_outside_the_tower_is_refused() -> None:
    config = {"model_type": "llava", "vision_config": {}, "text_config": {"model_type": "llama"}}
    for layer in (-50, 26):
        with pytest.raises(ConfigError, match="vision_feature_layer"):
            bind({**config, "vision_feature_layer": layer})


# --- what is counted as what -----------------------------------------------------------------------------------------
BERT: dict[str, Any] = {
    "hidden_size": D,
    "intermediate_size": FF,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 40,
}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", **BERT},
        {"model_type": "roberta", **BERT},
        {"model_type": "fnet", **BERT},
        {"model_type": "mra", **BERT},
        {"model_type": "xlm", "emb_dim": D, "n_layers": 2, "n_heads": HEADS, "n_words": VOCAB},
    ],
    ids=lambda config: config["model_type"],
)
def test_encoders_do_not_decode(config: dict[str, Any], phase: str) -> None:
    assert estimate_flops(config, seq_len=8, phase="forward").total
    with pytest.raises(WorkloadError, match="is an encoder: it does not decode"):
        estimate_flops(config, seq_len=8, phase=phase)


def test_decoders_of_the_same_type_decode() -> None:
    named = {"model_type": "bert", **BERT, "architectures": ["BertLMHeadModel"], "is_decoder": True}
    assert estimate_flops(named, seq_len=1, phase="decode", context=5).total
    causal = {"model_type": "xlm", "emb_dim": D, "n_layers": 2, "n_heads": HEADS, "n_words": VOCAB, "causal": True}
    assert estimate_flops(causal, seq_len=8, phase="prefill").total


@pytest.mark.parametrize(
    ("config", "named", "counted"),
    [
        (LLAMA, "LlamaForSequenceClassification", None),  # has a head of its own
        (LLAMA, "LlamaForMore", "LlamaForCausalLM"),
        (LLAMA, "LlamaForCausalLM", None),
        (LLAMA, "LLaMAForCausalLM", None),  # as early checkpoints wrote it
        ({"model_type": "bert", **BERT}, "BertForPreTraining", "BertForMaskedLM"),
        ({"model_type": "bert", **BERT}, "BertLMHeadModel", None),
        ({"model_type": "bert", **BERT}, None, None),
    ],
)
def test_a_config_of_another_class_is_noted(config: dict[str, Any], named: str | None, counted: str | None) -> None:
    given = config if named is None else {**config, "architectures": [named]}
    notes = [note for note in estimate_flops(given, seq_len=8).notes if "the config names" in note]
    if named is None:
        assert notes == [
            'the config names no class in architectures: counted as BertForMaskedLM; head="none", sequence:N or '
            "token:N counts another head"
        ]
        return
    assert notes == ([] if counted is None else [f"the config names {named}; counted as {counted}"])


@pytest.mark.heavy
def test_presets_name_the_class_that_is_counted() -> None:
    for name in list_data_files("presets"):
        estimator = bind(name)
        assert not [note for note in estimator.notes(Workload(1, 2)) if "the config names" in note], name


def test_grids_of_tiles_are_what_a_processor_can_make() -> None:
    for name in ("llama-4-scout", "llama-3.2-11b-vision", "llava-v1.6-mistral-7b"):
        vision = bind(name).vision
        assert vision is not None
        for width, height in itertools.product((30, 400, 1000, 1777), repeat=2):
            for grid in vision.grids_of_pixels(width, height, None)[0]:
                vision.check_tiles(grid, "grid")
    with pytest.raises(WorkloadError, match="image_grid_thw 2,9,9: T counts an image's tiles"):
        bind("llama-4-scout")(1, 5000, image_grid_thw=[[2, 9, 9]])


@pytest.mark.parametrize(("name", "is_noted"), [("gemma-4-e2b", True), ("llama-3.1-8b", False)])
def test_reentrant_checkpointing_is_noted_where_hf_drops_gradients(name: str, is_noted: bool) -> None:
    found = bind(name, recipe={"recompute": "full-reentrant"}, convention="hardware")(1, 64).notes
    assert any("drops their gradients" in note for note in found) is is_noted
    assert not any("drops their gradients" in note for note in bind(name, recipe={"recompute": "full"})(1, 64).notes)


@pytest.mark.parametrize("model", ["llama-3.1-8b", QWEN])
def test_a_batch_that_is_no_mapping(model: Any) -> None:
    with pytest.raises(WorkloadError, match="batch must be a mapping as given to the model"):
        estimate_flops(model, batch=[])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "sizes"),  # heads, latent, rotary part, rest of a head, head of values, layers
    [("deepseek-v3", (128, 512, 64, 128, 128, 61)), ("minicpm3-4b", (40, 256, 32, 64, 64, 62))],
)
def test_a_note_gives_what_engines_execute_of_latent_attention(name: str, sizes: tuple[int, ...]) -> None:
    heads, latent, rope, rest, value, layers = sizes
    found = estimate_flops(name, batch_size=3, seq_len=1, context=999, phase="decode")
    more = 2 * heads * 3 * 1000 * layers * (2 * latent + rope - (rest + rope + value))
    assert any(f"({found.total + more:,})" in note and "MLA" in note for note in found.notes)
    assert not any("MLA" in note for note in estimate_flops(name, seq_len=8).notes)


def test_published_weights_are_named() -> None:
    assert any('weights="mxfp4" counts them' in note for note in estimate_flops("gpt-oss-20b", seq_len=8).notes)
    assert not any("published" in note for note in estimate_flops("gpt-oss-20b", seq_len=8, weights="mxfp4").notes)


def test_a_batch_of_packed_rows_is_that_many_alike() -> None:
    whole = estimate_flops("qwen3-0.6b", batch_size=3, lengths=[500, 400])
    one = estimate_flops("qwen3-0.6b", lengths=[500, 400])
    assert whole.totals == {name: 3 * total for name, total in one.totals.items()}


def test_keys_that_are_not_read_are_named() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 9}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    odd = {**config, "n_layers": 3, "num_kv_heads": 2, "n_heads": 4, "head_dims": 16, "eos_token_id": 2, "n_experts": 8}
    notes = estimate_flops(odd, seq_len=8).notes
    assert [note for note in notes if "does not read" in note] == [
        "llama does not read head_dims = 16: did you mean head_dim?",
        "llama does not read n_layers = 3: num_hidden_layers = 2 is counted",
        "llama does not read num_kv_heads = 2: did you mean num_key_value_heads?",
        "llama does not read n_experts = 8: it is counted without",
    ]
    assert not any("does not read" in note for note in estimate_flops(config, seq_len=8).notes)
    assert not any("does not read" in note for note in estimate_flops("gpt2", seq_len=8).notes)


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"lengths": [4, 4], "device": "h100"}, "cudnn"),
        ({"lengths": [4, 4], "attention_kernel": "eager"}, "eager"),
        ({"lengths": [4, 4]}, None),  # flash: each document alone
        ({"lengths": [8], "device": "h100"}, None),
        ({"seq_len": 8, "device": "h100"}, None),
    ],
)
def test_packed_rows_say_what_a_mask_costs(changes: dict[str, Any], kernel: str | None) -> None:
    notes = [note for note in estimate_flops("llama-3.2-1b", **changes).notes if note.startswith("packed documents")]
    assert [f"so {kernel} attention computes every pair" in note for note in notes] == (
        [] if kernel is None else [True]
    )
