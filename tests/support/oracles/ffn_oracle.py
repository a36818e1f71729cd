"""The masked dense oracle of the sparse FFN: NumPy, float64, loops over groups.

Written from the equations, not from the library: no dispatch, no grouped GEMM, no
packed weights. Every matrix is full size and masked.
"""

import math

import ml_dtypes
import numpy as np

from tests.support.oracles.fp8_oracle import rounded

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def soft_threshold(w, axis):
    out = np.zeros_like(w)
    source, target = np.moveaxis(w, axis, -1), np.moveaxis(out, axis, -1)
    for index in np.ndindex(source.shape[:-1]):
        for start in range(0, source.shape[-1], 4):
            group = source[index][start : start + 4]
            threshold = sorted(abs(group))[1]
            for i, value in enumerate(group):
                target[index][start + i] = np.sign(value) * max(
                    abs(value) - threshold, 0.0
                )
    return out


def two_of_four(scores, axis):
    """The two largest scores of each group; ties go to the lower index."""
    mask = np.zeros(scores.shape, bool)
    source, target = np.moveaxis(scores, axis, -1), np.moveaxis(mask, axis, -1)
    for index in np.ndindex(source.shape[:-1]):
        for start in range(0, source.shape[-1], 4):
            group = list(source[index][start : start + 4])
            ranked = sorted(range(4), key=lambda i: (-group[i], i))
            for i in ranked[:2]:
                target[index][start + i] = True
    return mask


def heaviest_experts(y_up, experts, count):
    mass = np.maximum(y_up, 0) ** 4
    mass = mass.reshape(len(y_up), experts, -1).sum(-1)
    return np.argsort(-mass, axis=1, kind="stable")[:, :count]


def cluster_mask(expert_index, features, experts):
    mask = np.zeros((len(expert_index), features), bool)
    size = features // experts
    for token, chosen in enumerate(expert_index):
        for expert in chosen:
            mask[token, expert * size : (expert + 1) * size] = True
    return mask


def along_tokens(matrix, nonzeros, share, token_lists):
    """`matrix` with two of four tokens kept per feature, the densest features whole.

    token_lists: (features, tokens in order) pairs; groups of four follow the list,
    in which -1 is a token of zeros.
    """
    out = np.zeros_like(matrix)
    for features, tokens in token_lists:
        count = min(16 * math.ceil(share * len(features) / 16), len(features))
        ranked = sorted(features, key=lambda f: (-nonzeros[f], f))
        dense = set(ranked[:count])
        for feature in features:
            for start in range(0, len(tokens), 4):
                group = [t for t in tokens[start : start + 4] if t >= 0]
                ranked = sorted(
                    range(len(group)),
                    key=lambda i: (-abs(matrix[group[i], feature]), i),
                )
                kept = range(len(group)) if feature in dense else ranked[:2]
                for i in kept:
                    out[group[i], feature] = matrix[group[i], feature]
    return out


def ffn_oracle(
    x, w_up, w_down, dy, *, sparsity, scales, expert_index, token_order, y_up=None
):
    """(y, dx, dw_up, dw_down) of the sparse FFN for the output cotangent dy. `y_up` is
    the product of GEMM 1 where that rounds what it reads."""
    venom = sparsity.experts is not None
    tokens, features = len(x), w_up.shape[1]
    s_up, s_down_t = w_up, w_down.T
    if sparsity.weights is not None:
        s_up = scales[0] * soft_threshold(w_up, axis=0)
        if not sparsity.exact_gradients:
            s_down_t = scales[1] * soft_threshold(w_down.T, axis=0)
    # what GEMM 4 reads
    back_up = s_up if sparsity.exact_gradients else w_up

    if y_up is None:
        y_up = x @ s_up
    columns = np.ones((tokens, features), bool)
    if venom:
        if sparsity.router.inside:
            read = y_up
            if sparsity.router.reads == "y_up_fp8":
                rows = np.stack([rounded(row, E4M3) for row in x])
                read = rows @ rounded(s_up.astype(np.float32), E4M3)
            expert_index = heaviest_experts(
                read, sparsity.experts, sparsity.experts_per_token
            )
        columns = cluster_mask(expert_index, features, sparsity.experts)
    mask = columns
    two_four = sparsity.activations is not None and sparsity.activations.n == 2
    if two_four:
        mask = columns & two_of_four(y_up, axis=1)
    relu = np.maximum(y_up, 0)
    y = (relu * mask) ** 2 @ w_down

    da = dy @ s_down_t
    if sparsity.mask_reuse:
        a, dy_up = (relu * mask) ** 2, da * 2 * relu * mask
        dx = dy_up @ back_up.T
    else:
        inside = da * 2 * relu * columns
        chosen = inside
        if two_four:
            chosen = inside * two_of_four(abs(inside), axis=1)
        dx = chosen @ w_up.T
        seen = columns if sparsity.weight_gradients == "expert_columns" else True
        a, dy_up = relu**2 * seen, da * 2 * relu * seen

    if sparsity.token_sparsity == "magnitude":
        nonzeros = (a != 0).sum(0)
        size = features // (sparsity.experts or 1)
        lists = [(list(range(features)), list(token_order))]
        if sparsity.weight_gradients == "expert_columns":
            lists = [
                (
                    list(range(e * size, (e + 1) * size)),
                    [t for t in token_order if t >= 0 and e in expert_index[t]],
                )
                for e in range(sparsity.experts)
            ]
        share = sparsity.dense_features
        a = along_tokens(a, nonzeros, share, lists)
        dy_up = along_tokens(dy_up, nonzeros, share, lists)
    return y, dx, x.T @ dy_up, a.T @ dy
