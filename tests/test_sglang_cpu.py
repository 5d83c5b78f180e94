"""The stand-in kernels against plain definitions: dense attention, a tree walked node by node, lists of slots."""

import importlib
import random

import pytest
import torch

if torch.version.cuda or torch.version.hip:
    pytest.skip("the stand-in must not be installed beside a GPU build of torch", allow_module_level=True)

import sgl_kernel

ops = torch.ops.sgl_kernel
SLOTS, POOL_LEN, DIM = 64, 24, 8


def test_cuda_has_nothing_to_wait_for():
    """SGLang's MLA drafter waits for it."""
    torch.cuda.synchronize()


# ---- attention


def dense(q, k, v, mask, scale):
    """Softmax attention, head by head, in float64: q [T, Hq, D], k and v [S, Hkv, D], mask [T, S]."""
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    for head in range(q.shape[1]):
        kv = head // (q.shape[1] // k.shape[1])
        scores = (q[:, head].double() @ k[:, kv].double().T * scale).masked_fill(~mask, float("-inf"))
        out[:, head] = scores.softmax(-1) @ v[:, kv].double()
    return out


def paged_batch(seed, query_heads, kv_heads, lengths):
    """A KV cache, and requests whose slots lie scattered in it and whose pool rows are in no order."""
    generator = torch.Generator().manual_seed(seed)
    k_cache, v_cache = (torch.randn(SLOTS, kv_heads, DIM, generator=generator) for _ in range(2))
    slots = torch.randperm(SLOTS, generator=generator).int()
    table = torch.full((len(lengths) + 2, POOL_LEN), SLOTS - 1, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length], slots = slots[:length], slots[length:]
    queries = torch.randn(sum(lengths), query_heads, DIM, generator=generator)
    return k_cache, v_cache, table, rows, torch.tensor(lengths), queries


def decode(q, k_cache, v_cache, output, key, value, loc, requests, cap=0.0, cross=False, window=0, **others):
    scales, scratch = others.pop("scales", (1.0, 1.0)), torch.empty(0)
    ops.decode_attention_cpu(
        q, k_cache, v_cache, *scales, output, key, value, loc, scratch, *requests, 0.3, cap, cross, window, **others
    )


def extend(q, k, v, output, k_cache, v_cache, requests, new, start, window=0, **others):
    scales, where = (1.0, 1.0), (*requests, new, start, int(new.max()))
    ops.extend_attention_cpu(q, k, v, output, k_cache, v_cache, *scales, *where, 0.3, 0.0, False, window, **others)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("stored_before", [False, True])
def test_decode_attention_is_dense_attention_over_the_requests_slots(kv_heads, stored_before):
    k_cache, v_cache, table, rows, lengths, queries = paged_batch(0, 6, kv_heads, [1, 7, 13])
    query, output = queries[:3], torch.empty(3, 6, DIM)
    loc = torch.stack([table[row, length - 1] for row, length in zip(rows, lengths, strict=True)]).long()
    key, value = torch.randn(3, kv_heads, DIM), torch.randn(3, kv_heads, DIM)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    expected_k[loc], expected_v[loc] = key, value
    if stored_before:
        k_cache, v_cache, key, value = expected_k.clone(), expected_v.clone(), None, None
    decode(query, k_cache, v_cache, output, key, value, loc, (table, rows, lengths))
    assert torch.equal(k_cache, expected_k) and torch.equal(v_cache, expected_v)
    for b in range(3):
        slots = table[rows[b], : lengths[b]].long()
        seen = torch.ones(1, len(slots), dtype=torch.bool)
        expected = dense(query[b : b + 1], expected_k[slots], expected_v[slots], seen, 0.3)
        torch.testing.assert_close(output[b : b + 1].double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("masking", ["causal", "full", "tree"])
@pytest.mark.parametrize("stored_before", [False, True])
@pytest.mark.parametrize("few", [0, 16])  # both ways to compute it
def test_extend_attention_is_dense_attention_behind_the_prefix(kv_heads, masking, stored_before, few, monkeypatch):
    monkeypatch.setattr("sgl_kernel.attention.FEW", few)
    totals, news = [9, 5, 12], [4, 5, 1]  # a prefix of 5, none, 11
    k_cache, v_cache, table, rows, lengths, queries = paged_batch(1, 6, kv_heads, totals)
    new = torch.tensor(news)
    start = new.cumsum(0) - new
    q, output = queries[: sum(news)], torch.empty(sum(news), 6, DIM)
    k_new, v_new = torch.randn(sum(news), kv_heads, DIM), torch.randn(sum(news), kv_heads, DIM)
    tree = [torch.rand(m, m) < 0.5 for m in news]
    blocks = {
        "causal": [torch.ones(m, m, dtype=torch.bool).tril() for m in news],
        "full": [torch.ones(m, m, dtype=torch.bool) for m in news],
        "tree": [block | torch.eye(len(block), dtype=torch.bool) for block in tree],
    }[masking]
    full_k, full_v = k_cache.clone(), v_cache.clone()
    for b, (total, m) in enumerate(zip(totals, news, strict=True)):
        slots = table[rows[b], total - m : total].long()
        full_k[slots], full_v[slots] = k_new[start[b] : start[b] + m], v_new[start[b] : start[b] + m]
    if stored_before:
        k_cache, v_cache, k_new, v_new = full_k, full_v, None, None
    tree_mask = torch.cat([block.flatten() for block in blocks]) if masking == "tree" else None
    how = {"tree_mask": tree_mask, "is_causal": masking != "full"}
    extend(q, k_new, v_new, output, k_cache, v_cache, (table, rows, lengths), new, start, **how)
    for b, (total, m) in enumerate(zip(totals, news, strict=True)):
        slots, at = table[rows[b], :total].long(), slice(start[b], start[b] + m)
        mask = torch.cat([torch.ones(m, total - m, dtype=torch.bool), blocks[b]], dim=1)
        expected = dense(q[at], full_k[slots], full_v[slots], mask, 0.3)
        torch.testing.assert_close(output[at].double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("few", [0, 16])
def test_latent_attention_prefills_with_the_keys_that_it_brings(few, monkeypatch):
    """MLA's cache holds latents: one head of another width than the keys and values that prefill computes from them."""
    monkeypatch.setattr("sgl_kernel.attention.FEW", few)
    lengths, heads, latents = torch.tensor([4, 9]), 6, torch.randn(SLOTS, 1, DIM + 3)
    table, rows = torch.arange(2 * POOL_LEN, dtype=torch.int32).view(2, POOL_LEN), torch.tensor([1, 0])
    q, k, v = torch.randn(13, heads, DIM), torch.randn(13, heads, DIM), torch.randn(13, heads, DIM - 2)
    output, start = torch.empty(13, heads, DIM - 2), torch.tensor([0, 4])
    extend(q, k, v, output, latents, latents[..., :DIM], (table, rows, lengths), lengths, start)
    for first, length in ((0, 4), (4, 9)):
        at = slice(first, first + length)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        torch.testing.assert_close(output[at].double(), dense(q[at], k[at], v[at], causal, 0.3), atol=1e-6, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="expand MLA's cache"):
        extend(q, k, v, output, latents, latents[..., :DIM], (table, rows, lengths + 1), lengths, start)


@pytest.mark.parametrize(
    ("what", "setting"),
    [
        ("soft cap", {"cap": 30.0}),
        ("cross attention", {"cross": True}),
        ("sliding window", {"window": 128}),
        ("sinks", {"sinks": torch.zeros(2)}),
        ("scaled KV cache", {"scales": (0.5, 1.0)}),
    ],
)
def test_attention_refuses_what_it_does_not_do(what, setting):
    k_cache, v_cache, table, rows, lengths, queries = paged_batch(2, 2, 2, [3])
    loc = table[rows, 2].long()
    with pytest.raises(NotImplementedError, match=what):
        q = queries[:1]
        decode(q, k_cache, v_cache, q.clone(), None, None, loc, (table, rows, lengths), **setting)


def test_extend_attention_refuses_too():
    k_cache, v_cache, table, rows, lengths, q = paged_batch(2, 2, 2, [3])
    rest = ((table, rows, lengths), lengths, torch.tensor([0]))
    with pytest.raises(NotImplementedError, match="sliding window"):
        extend(q, None, None, q.clone(), k_cache, v_cache, *rest, window=9)
    with pytest.raises(NotImplementedError, match="KV cache in torch.bfloat16"):
        extend(q, None, None, q.clone(), k_cache.bfloat16(), v_cache.bfloat16(), *rest)


# ---- trees


def random_draft(rng, topk, steps, kept):
    """What SGLang hands over after drafting: running numbers of the kept candidates, and the parents table.
    Beside them the same tree as plain parents: node -> node, 0 the root."""
    beams, table, parent = list(range(topk)), [-1, *range(topk)], dict.fromkeys(range(topk), None)
    for step in range(1, steps):
        first = topk + topk * topk * (step - 1)
        for b, beam in enumerate(beams):
            parent.update({first + b * topk + c: beam for c in range(topk)})
        beams = rng.sample(range(first, first + topk * topk), topk)
        table += beams
    chosen: set[int] = set()
    while len(chosen) < kept:  # a candidate never without its parent
        free = [c for c, p in parent.items() if c not in chosen and (p is None or p in chosen)]
        chosen.add(rng.choice(free))
    order = sorted(chosen)
    parents = [None] + [0 if parent[c] is None else order.index(parent[c]) + 1 for c in order]
    return order, table[: 1 + topk * (steps - 1)], parents


def build(kept, table, lengths, topk, steps, n, mode=1):
    batch = len(lengths)
    mask = torch.full((batch * n * n,), True)
    positions = torch.empty(batch * n, dtype=torch.long)
    lists = torch.full((3, batch, n), -1)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor(table), torch.tensor(kept), torch.tensor(lengths), mask, positions, *lists, topk, steps, n, mode
    )
    return mask.view(batch, n, n), positions.view(batch, n), *lists


@pytest.mark.parametrize(("topk", "steps", "n"), [(1, 3, 4), (2, 3, 6), (4, 4, 16), (3, 1, 4)])
def test_tree_links_masks_and_positions_are_those_of_the_plain_tree(topk, steps, n):
    rng = random.Random(topk * 100 + n)
    drafts = [random_draft(rng, topk, steps, n - 1) for _ in range(5)]
    lengths = [rng.randrange(1, 40) for _ in drafts]
    kept, table, _ = (list(column) for column in zip(*drafts, strict=True))
    mask, positions, index, first_child, next_sibling = build(kept, table, lengths, topk, steps, n)
    assert index.flatten().tolist() == list(range(5 * n))
    for b, (_, _, parents) in enumerate(drafts):
        for node in range(n):
            path, up = [node], parents[node]
            while up is not None:
                path.append(up)
                up = parents[up]
            assert set(mask[b, node].nonzero().flatten().tolist()) == set(path)
            assert positions[b, node] == lengths[b] + len(path) - 1
            children, child = [], int(first_child[b, node])
            while child != -1:
                children.append(child)
                child = int(next_sibling[b, child])
            assert children == [i for i in range(1, n) if parents[i] == node]


def test_a_node_whose_parent_was_not_kept_is_reached_by_no_list():
    # topk 2: candidate 4 is a child of candidate 1, which is not kept
    mask, positions, _, first_child, next_sibling = build([[0, 4]], [[-1, 0, 1]], [7], 2, 2, 3)
    assert first_child.tolist() == [[1, -1, -1]] and next_sibling.tolist() == [[-1, -1, -1]]
    assert mask[0, 2].tolist() == [True, False, True] and positions.tolist() == [[7, 8, 8]]


def test_other_tree_mask_modes_are_refused():
    with pytest.raises(NotImplementedError, match="mask mode"):
        build([[0, 1]], [[-1]], [7], 2, 1, 3, mode=0)


@pytest.mark.parametrize(("topk", "steps", "n"), [(1, 3, 4), (2, 3, 6), (4, 4, 16)])
def test_greedy_verification_walks_the_tree_as_the_target_would(topk, steps, n):
    rng, batch = random.Random(n), 40
    drafts = [random_draft(rng, topk, steps, n - 1) for _ in range(batch)]
    kept, table, _ = (list(column) for column in zip(*drafts, strict=True))
    _, _, *lists = build(kept, table, [5] * batch, topk, steps, n)
    tokens = [[rng.randrange(3) for _ in range(n)] for _ in range(batch)]  # few words, so that many agree
    choices = [[rng.randrange(3) for _ in range(n)] for _ in range(batch)]
    predicts = torch.full((batch * n,), -7)
    accept_index, accepted = torch.full((batch, steps + 1), -1), torch.empty(batch, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted, candidates=torch.tensor(tokens),
        retrive_index=lists[0], retrive_next_token=lists[1], retrive_next_sibling=lists[2],
        target_predict=torch.tensor(choices),
    )  # fmt: skip
    for b, (_, _, parents) in enumerate(drafts):
        walk = [0]
        while True:
            agreeing = [i for i in range(n) if parents[i] == walk[-1] and tokens[b][i] == choices[b][walk[-1]]]
            if not agreeing:
                break
            walk.append(agreeing[0])
        assert accepted[b] == len(walk) - 1
        assert accept_index[b].tolist() == [b * n + node for node in walk] + [-1] * (steps + 1 - len(walk))
        expected = [choices[b][node] if node in walk else -7 for node in range(n)]
        assert predicts[b * n : (b + 1) * n].tolist() == expected
    assert accepted.float().mean() > 0.3, "the case is too easy: hardly anything is accepted"


def test_verification_accepts_no_more_tokens_than_there_is_room_for():
    chain = [torch.tensor([x]) for x in ([0, 1, 2, 3], [1, 2, 3, -1], [-1, -1, -1, -1])]
    predicts, accept_index, accepted = torch.zeros(4).long(), torch.full((1, 3), -1), torch.zeros(1).long()
    same = torch.tensor([[5, 5, 5, 5]])
    sgl_kernel.verify_tree_greedy_cpu(predicts, accept_index, accepted, same, *chain, same)
    assert accepted.tolist() == [2] and accept_index.tolist() == [[0, 1, 2]]


def test_multi_layer_eagle_is_refused():
    with pytest.raises(NotImplementedError, match="multi-layer EAGLE"):
        sgl_kernel.rotate_input_ids_cpu(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1))


# ---- bookkeeping of slots


def test_slots_go_to_positions_and_come_back():
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([4, 5])
    table = torch.zeros(3, 6, dtype=torch.int32)
    slots = torch.tensor([11, 12, 13, 14, 15])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 6)
    assert table.tolist() == [[0, 0, 0, 14, 15, 0], [0] * 6, [0, 11, 12, 13, 0, 0]]
    back = torch.zeros(7, dtype=torch.long)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, back, 6)
    assert back.tolist() == [11, 12, 13, 14, 15, 0, 0]


def test_draft_slots_lie_behind_the_requests_tokens():
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    out = torch.zeros(8, dtype=torch.long)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(torch.tensor([2, 0]), table, torch.tensor([3, 5]), out, 10, 2, 2)
    assert out.tolist() == [23, 24, 25, 26, 5, 6, 7, 8]


def test_each_branch_sees_the_tokens_and_its_own_draft_slots():
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    seen = sgl_kernel.build_draft_decode_metadata_cpu(table, torch.tensor([1, 0]), torch.tensor([2, 4]), 2, 3, 10)
    assert seen[0, :5].tolist() == [10, 11, 12, 13, 14] and seen[1, :5].tolist() == [10, 11, 15, 16, 17]
    assert seen[2, :7].tolist() == [0, 1, 2, 3, 4, 5, 6] and seen[3, :7].tolist() == [0, 1, 2, 3, 7, 8, 9]
    assert seen.shape == (4, 10)


def test_bonus_tokens_are_the_last_accepted_ones():
    accepted = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
    bonus = torch.zeros(3, dtype=torch.long)
    sgl_kernel.fill_bonus_tokens_cpu(accepted.flatten(), torch.tensor([2, 1, 3], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [2, 3, 6]


def test_slots_of_accepted_tokens_are_packed_to_the_front():
    index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]])
    out = torch.zeros(9, dtype=torch.long)
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, torch.arange(100, 109), out)
    assert out.tolist() == [100, 102, 103, 106, 107, 108, 0, 0, 0]


def test_kv_rows_move_in_every_buffer_though_sources_and_targets_overlap():
    buffers = [torch.randn(10, 2, 4), torch.randn(10, 3).bfloat16()]
    before = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 9])
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for buffer, old in zip(buffers, before, strict=True):
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(buffer, expected)


# ---- what is installed


def test_the_stand_in_refuses_a_cuda_build_of_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ImportError, match="stand-in for machines without a GPU, but torch is built for CUDA 13.0"):
        importlib.reload(sgl_kernel)


def test_torchvision_imports_beside_a_cpu_build_of_torch():
    import torchvision

    assert torchvision.__version__.startswith("0.28.0")
