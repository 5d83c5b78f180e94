"""The draft tree of speculative decoding, [B, N] nodes: how SGLang links it, and how it is walked against the target.

Node 0 is the last token the target confirmed. Children hang in a list: `retrive_next_token` is a node's first child,
`retrive_next_sibling` the next one, -1 none; `retrive_index` numbers all nodes of the batch (SGLang's spelling)."""

import torch

DRAFT_BY_DRAFT = 1  # SGLang's TreeMaskMode.QLEN_ONLY, the only one that its CPU attention takes


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """Link the N - 1 draft tokens that were kept into a tree, and write its mask, its positions and its three lists.

    Every draft step expands `topk` branches by `topk` candidates each; `selected_index` [B, N-1] are the kept
    candidates by their running number, ascending. Candidates 0..topk-1 are children of node 0; a later candidate c is a
    child of candidate `parent_list[b, c // topk]`. A path scores no better than its beginning, so a parent is kept with
    its child, but for a tie at the last place: such an orphan keeps its node, and no list leads there.
    Writes `tree_mask` [B * N * N] (row i sees itself, its ancestors, node 0), `positions` [B * N], the lists [B, N].
    """
    if int(tree_mask_mode) != DRAFT_BY_DRAFT:
        raise NotImplementedError(f"the CPU stand-in builds tree mask mode {DRAFT_BY_DRAFT} only, not {tree_mask_mode}")
    n = draft_token_num
    masks, positions = tree_mask[: verified_seq_len.numel() * n * n].view(-1, n, n), positions.view(-1, n)
    for b, (length, kept, parent_of) in enumerate(
        zip(verified_seq_len.tolist(), selected_index.tolist(), parent_list.tolist(), strict=True)
    ):
        node_of = {candidate: i + 1 for i, candidate in enumerate(kept)}
        parents = [-1] + [0 if c < topk else node_of.get(parent_of[c // topk], -1) for c in kept]
        first_child, next_sibling = [-1] * n, [-1] * n
        for i in range(n - 1, 0, -1):  # backwards, so that a list of children ascends
            if parents[i] >= 0:
                next_sibling[i], first_child[parents[i]] = first_child[parents[i]], i
        sees = torch.eye(n, dtype=torch.bool)  # [N, N]
        for i in range(1, n):
            sees[i] |= sees[max(parents[i], 0)]  # a parent comes before its children
        masks[b] = sees
        positions[b] = length + sees.sum(1) - 1
        retrive_index[b] = torch.arange(b * n, (b + 1) * n)
        retrive_next_token[b] = torch.tensor(first_child)
        retrive_next_sibling[b] = torch.tensor(next_sibling)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Walk each tree from node 0, always to the child whose token is the target's choice at the node, until none is.

    `candidates` [B, N] are the nodes' tokens, `target_predict` [B, N] the target's choice after each node. Writes
    `accept_index` [B, steps + 1] (numbers of the nodes walked, node 0 first; the rest stays), `accept_token_num` [B]
    (without node 0) and `predicts` [B * N] at the nodes walked; the last of these is the bonus token.
    """
    choice = target_predict.reshape(-1).tolist()
    longest = accept_index.shape[1] - 1
    trees = (candidates.tolist(), retrive_index.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist())
    for b, (tokens, number, first_child, next_sibling) in enumerate(zip(*trees, strict=True)):
        node, accepted = 0, 0
        while True:
            here = number[node]
            accept_index[b, accepted] = here
            predicts[here] = choice[here]
            node = first_child[node] if accepted < longest else -1
            while node != -1 and tokens[node] != choice[here]:
                node = next_sibling[node]
            if node == -1:
                break
            accepted += 1
        accept_token_num[b] = accepted


def rotate_input_ids_cpu(*arguments):
    raise NotImplementedError("the CPU stand-in does not do multi-layer EAGLE")
