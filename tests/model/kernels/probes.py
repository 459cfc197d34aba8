"""Kernels that do one thing to a flat array, so that what other kernels inline can be tested by itself."""

from drumline.model.kernels import vectors as v
from drumline.model.kernels.compile import kernel
from drumline.model.kernels.quantise import activate, exp2, quantise, rotate


@kernel
def exp2_of(x, out):
    for i in range(0, len(x), 16):
        v.store(out, i, exp2(v.load(x, i)))


@kernel
def activation_of(x, activation, out):
    for i in range(0, len(x), 16):
        v.store(out, i, activate(v.load(x, i), activation))


@kernel
def rotate_all(x, width):
    rotate(x, 0, len(x), width)


@kernel
def quantise_all(x, codes):
    return quantise(x, 0, len(x), codes, 0)


@kernel
def convert(x, out):
    for i in range(0, len(x), 16):
        v.store(out, i, v.load(x, i))
