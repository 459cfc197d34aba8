"""Exponentials, activations, and what turns a token's float32 vector into int8 codes: rotation and rounding.

Vectors are padded with zeros to a multiple of 16; `start` is a flat index.
"""

import numpy as np

from drumline.model.kernels import vectors as v
from drumline.model.kernels.compile import inlined

ZERO, ONE = np.float32(0), np.float32(1)
_LIMIT = np.float32(126)
# 2^r on [-0.5, 0.5], relative error below 1e-7; literal, so that no machine fits them anew.
_C1, _C2, _C3 = np.float32(0.6931471824645996), np.float32(0.24022647738456726), np.float32(0.055503323674201965)
_C4, _C5, _C6 = np.float32(0.00961843691766262), np.float32(0.0013398875016719103), np.float32(0.00015353361959569156)
_LOG2E = np.float32(1.4426950408889634)
_SMALLEST = np.float32(1e-30)  # a token whose values are all below this is zero: 127 / m must stay finite
_STEPS = np.float32(127)

SILU, GELU_TANH, GELU = 0, 1, 2
"""How kernels number the activations of `ModelConfig`."""


@inlined
def exp2(x):
    """2^x lane by lane for |x| ≤ 126; beyond, and for infinities, as at the limit; NaN stays NaN."""
    x = v.at_least(v.at_most(x, v.broadcast(_LIMIT)), v.broadcast(-_LIMIT))
    n = v.whole(x)
    r = v.subtract(x, n)
    p = v.multiply_add(v.broadcast(_C6), r, v.broadcast(_C5))
    p = v.multiply_add(p, r, v.broadcast(_C4))
    p = v.multiply_add(p, r, v.broadcast(_C3))
    p = v.multiply_add(p, r, v.broadcast(_C2))
    p = v.multiply_add(p, r, v.broadcast(_C1))
    return v.multiply(v.multiply_add(p, r, v.broadcast(ONE)), v.power_of_two(n))


@inlined
def sigmoid_times(x, y):
    """x / (1 + e^−y)."""
    return v.divide(x, v.add(v.broadcast(ONE), exp2(v.multiply(y, v.broadcast(-_LOG2E)))))


@inlined
def activate(x, activation):
    """SiLU, GELU (Hendrycks & Gimpel 2016) by tanh or by erf, lane by lane."""
    if activation == SILU:
        return sigmoid_times(x, x)
    if activation == GELU_TANH:  # (1 + tanh u) / 2 is the sigmoid of 2u
        cube = v.multiply(v.multiply(x, x), x)
        u = v.multiply_add(cube, v.broadcast(np.float32(0.044715)), x)
        return sigmoid_times(x, v.multiply(u, v.broadcast(np.float32(1.5957691216057308))))
    return v.multiply(x, _normal_cdf(x))


@inlined
def _normal_cdf(x):
    """(1 + erf(x / √2)) / 2, absolute error below 5e-7: Abramowitz & Stegun 7.1.26."""
    z = v.multiply(v.magnitude(x), v.broadcast(np.float32(0.7071067811865476)))
    t = v.divide(v.broadcast(ONE), v.multiply_add(z, v.broadcast(np.float32(0.3275911)), v.broadcast(ONE)))
    p = v.multiply_add(v.broadcast(np.float32(1.061405429)), t, v.broadcast(np.float32(-1.453152027)))
    p = v.multiply_add(p, t, v.broadcast(np.float32(1.421413741)))
    p = v.multiply_add(p, t, v.broadcast(np.float32(-0.284496736)))
    p = v.multiply_add(p, t, v.broadcast(np.float32(0.254829592)))
    e = exp2(v.multiply(v.multiply(z, z), v.broadcast(-_LOG2E)))
    erf = v.copy_sign(v.subtract(v.broadcast(ONE), v.multiply(v.multiply(p, t), e)), x)
    return v.multiply_add(erf, v.broadcast(np.float32(0.5)), v.broadcast(np.float32(0.5)))


@inlined
def rotate(x, start, length, width):
    """Hadamard transform in place, unnormalised, in blocks of `width`: a power of two ≤ 64 that divides the length."""
    for i in range(start, start + length, 16):
        if width == 1:
            return
        a = v.load(x, i)
        if width >= 2:
            a = v.butterfly_1(a)
        if width >= 4:
            a = v.butterfly_2(a)
        if width >= 8:
            a = v.butterfly_4(a)
        if width >= 16:
            a = v.butterfly_8(a)
        v.store(x, i, a)
    distance = 16
    while distance < width:
        for block in range(start, start + length, 2 * distance):
            for i in range(block, block + distance, 16):
                a, b = v.load(x, i), v.load(x, i + distance)
                v.store(x, i, v.add(a, b))
                v.store(x, i + distance, v.subtract(a, b))
        distance *= 2


@inlined
def quantise(x, start, length, codes, code_start):
    """x[start:][:length] → whole numbers −127 … 127 in `codes`; returns what one step of them is worth.

    A NaN or infinity anywhere makes that NaN, so that it reaches the logits whatever the codes say.
    """
    top, trace = v.broadcast(ZERO), v.broadcast(ZERO)
    for i in range(start, start + length, 16):
        a = v.load(x, i)
        top = v.larger(v.magnitude(a), top)
        trace = v.multiply_add(a, v.broadcast(ZERO), trace)
    most = v.highest(top)
    factor = v.broadcast(_STEPS / most if most > _SMALLEST else ZERO)
    for i in range(0, length, 16):
        v.store(codes, code_start + i, v.whole(v.multiply(v.load(x, start + i), factor)))
    return most / _STEPS + v.total(trace)
