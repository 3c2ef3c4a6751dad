"""Special functions that ONNX has not, as ops of torch that it has, in fp64.

Each is right to about 1e-15 where its value is no small difference, so that what is left of it in
fp32, or less, is rounded once: a formula of fp64 is no slower than one of fp32 on CPUs, and needs
no cases for the values that fp32 loses. Infinities, NaN and poles are those of torch's kernels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from enginecast.passes.ir.edit import aten

_I0E_A = (
    *(
        -4.4153416464793395e-18,
        3.3307945188222384e-17,
        -2.431279846547955e-16,
        1.715391285555133e-15,
    ),
    *(-1.1685332877993451e-14, 7.676185498604936e-14, -4.856446783111929e-13, 2.95505266312964e-12),
    *(
        -1.726826291441556e-11,
        9.675809035373237e-11,
        -5.189795601635263e-10,
        2.6598237246823866e-09,
    ),
    *(
        -1.300025009986248e-08,
        6.046995022541919e-08,
        -2.670793853940612e-07,
        1.1173875391201037e-06,
    ),
    *(
        -4.4167383584587505e-06,
        1.6448448070728896e-05,
        -5.754195010082104e-05,
        0.00018850288509584165,
    ),
    *(-0.0005763755745385824, 0.0016394756169413357, -0.004324309995050576, 0.010546460394594998),
    *(-0.02373741480589947, 0.04930528423967071, -0.09490109704804764, 0.17162090152220877),
    *(-0.3046826723431984, 0.6767952744094761),
)
_I0E_B = (
    *(-7.233180487874754e-18, -4.830504485944182e-18, 4.46562142029676e-17, 3.461222867697461e-17),
    *(
        -2.8276239805165836e-16,
        -3.425485619677219e-16,
        1.7725601330565263e-15,
        3.8116806693526224e-15,
    ),
    *(-9.554846698828307e-15, -4.150569347287222e-14, 1.54008621752141e-14, 3.8527783827421426e-13),
    *(
        7.180124451383666e-13,
        -1.7941785315068062e-12,
        -1.3215811840447713e-11,
        -3.1499165279632416e-11,
    ),
    *(1.1889147107846439e-11, 4.94060238822497e-10, 3.3962320257083865e-09, 2.266668990498178e-08),
    *(2.0489185894690638e-07, 2.8913705208347567e-06, 6.889758346916825e-05, 0.0033691164782556943),
    *(0.8044904110141088,),
)
_I1E_A = (
    *(
        2.7779141127610464e-18,
        -2.111421214358166e-17,
        1.5536319577362005e-16,
        -1.1055969477353862e-15,
    ),
    *(
        7.600684294735408e-15,
        -5.042185504727912e-14,
        3.223793365945575e-13,
        -1.9839743977649436e-12,
    ),
    *(
        1.1736186298890901e-11,
        -6.663489723502027e-11,
        3.625590281552117e-10,
        -1.8872497517228294e-09,
    ),
    *(
        9.381537386495773e-09,
        -4.445059128796328e-08,
        2.0032947535521353e-07,
        -8.568720264695455e-07,
    ),
    *(
        3.4702513081376785e-06,
        -1.3273163656039436e-05,
        4.781565107550054e-05,
        -0.00016176081582589674,
    ),
    *(0.0005122859561685758, -0.0015135724506312532, 0.004156422944312888, -0.010564084894626197),
    *(0.024726449030626516, -0.05294598120809499, 0.1026436586898471, -0.17641651835783406),
    *(0.25258718644363365,),
)
_I1E_B = (
    *(
        7.517296310842105e-18,
        4.414348323071708e-18,
        -4.6503053684893586e-17,
        -3.209525921993424e-17,
    ),
    *(
        2.96262899764595e-16,
        3.3082023109209285e-16,
        -1.8803547755107825e-15,
        -3.8144030724370075e-15,
    ),
    *(
        1.0420276984128802e-14,
        4.272440016711951e-14,
        -2.1015418427726643e-14,
        -4.0835511110921974e-13,
    ),
    *(
        -7.198551776245908e-13,
        2.0356285441470896e-12,
        1.4125807436613782e-11,
        3.2526035830154884e-11,
    ),
    *(
        -1.8974958123505413e-11,
        -5.589743462196584e-10,
        -3.835380385964237e-09,
        -2.6314688468895196e-08,
    ),
    *(
        -2.512236237870209e-07,
        -3.882564808877691e-06,
        -0.00011058893876262371,
        -0.009761097491361469,
    ),
    *(0.7785762350182801,),
)
"""Chebyshev coefficients of Cephes, which torch has, too: of exp(-x) I0(x) and exp(-x) I1(x) / x up
to 8, and of those times sqrt(x) beyond."""

_LEAST = 1e-11
"""Coefficients below do not reach fp32."""
_LANCZOS = (
    *(0.99999999999980993, 676.5203681218851, -1259.1392167224028),
    *(771.32342877765313, -176.61502916214059, 12.507343278686905),
    *(-0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7),
)
"""Of the gamma function, with g = 7."""
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
"""B(2k) / 2k, of the asymptotic series."""
_SHIFT = 10
"""Steps of the recurrence of the digamma function, beyond which its series is exact."""

_CENTER = (
    (
        *(3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427),
        *(13731.693765509461125, 45921.953931549871457, 67265.770927008700853),
        *(33430.575583588128105, 2509.0809287301226727),
    ),
    (
        *(1.0, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077),
        *(21213.794301586595867, 39307.895800092710610, 28729.085735721942674),
        5226.4952788528545610,
    ),
)
_ASIDE = (
    (
        *(1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550),
        *(3.64784832476320460504, 1.27045825245236838258, 0.241780725177450611770),
        *(0.0227238449892691845833, 7.74545014278341407640e-4),
    ),
    (
        *(1.0, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550),
        *(0.148103976427480074590, 0.0151986665636164571966, 5.47593808499534494600e-4),
        1.05075007164441684324e-9,
    ),
)
_TAIL = (
    (
        *(6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580),
        *(0.296560571828504891230, 0.0265321895265761230930, 1.24266094738807843860e-3),
        *(2.71155556874348757815e-5, 2.01033439929228813265e-7),
    ),
    (
        *(1.0, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525),
        *(7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7),
        2.04426310338993978564e-15,
    ),
)
"""Quotients of polynomials, constants first, of the normal quantiles: Wichura, algorithm AS 241,
1988."""


def _in_fp64(formula: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Compute a formula in fp64; its result has the dtype that torch gives."""

    def widened(x: Tensor) -> Tensor:
        real = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        return formula(real.to(torch.float64)).to(real.dtype)

    return widened


def _polynomial(factors: Sequence[float], x: Tensor) -> Tensor:
    result = x * factors[-1] + factors[-2]
    for factor in factors[-3::-1]:
        result = result * x + factor
    return result


def _turn(x: Tensor) -> Tensor:
    """pi times the distance to the nearest whole number, exact where x is large."""
    return (x - x.round()) * math.pi


@_in_fp64
def _lgamma(x: Tensor) -> Tensor:
    """Lanczos's, with Euler's reflection for x < 0.5."""
    is_left = x < 0.5
    right = torch.where(is_left, 1 - x, x)
    total: Any = _LANCZOS[0]
    for place, factor in enumerate(_LANCZOS[1:]):
        total = factor / (right + place) + total
    shifted = right + 6.5
    found = (right - 0.5) * (shifted.log() - 1) + total.log()
    found = found + (0.5 * math.log(2 * math.pi) - 7)
    mirrored = (math.pi / _turn(x).sin().abs()).log() - found
    result = torch.where(is_left, mirrored, found)
    result = torch.where((x == 1) | (x == 2), 0.0, result)
    return torch.where(x.abs() == math.inf, math.inf, result)


@_in_fp64
def _digamma(x: Tensor) -> Tensor:
    """By the recurrence to x + 10, and the series there; mirrored for x < 0."""
    is_left = x < 0
    right = torch.where(is_left, 1 - x, x)
    lost: Any = right.reciprocal()
    for place in range(1, _SHIFT):
        lost = lost + (right + place).reciprocal()
    large = right + _SHIFT
    inverse = large.reciprocal()
    square = inverse * inverse
    series = _polynomial(_DIGAMMA, square) * square
    found = large.log() - 0.5 * inverse - series - lost
    turn = _turn(x)
    mirrored = found - math.pi * turn.cos() / turn.sin()
    is_pole = is_left & (x == x.round())
    result = torch.where(is_left, mirrored, found)
    return torch.where(is_pole, math.nan, torch.where(x == 0, x.reciprocal().neg(), result))


def _quantile(from_half: Tensor, outside: Tensor) -> Tensor:
    """The normal quantile of a probability.

    Args:
        from_half: the probability less 0.5.
        outside: the smaller one of the probability and its rest.
    """
    near = 0.180625 - from_half * from_half
    center = from_half * _quotient(_CENTER, near)
    root = outside.log().neg().sqrt()
    far = torch.where(root <= 5, _quotient(_ASIDE, root - 1.6), _quotient(_TAIL, root - 5))
    far = torch.where(outside == 0, math.inf, far)
    far = torch.where(from_half < 0, far.neg(), far)
    return torch.where(from_half.abs() <= 0.425, center, far)


def _quotient(parts: tuple[Sequence[float], Sequence[float]], x: Tensor) -> Tensor:
    above, below = parts
    return _polynomial(above, x) / _polynomial(below, x)


@_in_fp64
def _ndtri(x: Tensor) -> Tensor:
    return _quantile(x - 0.5, torch.minimum(x, 1 - x))


@_in_fp64
def _erfinv(x: Tensor) -> Tensor:
    return _quantile(x * 0.5, (1 - x.abs()) * 0.5) * math.sqrt(0.5)


def _bessel(near: Sequence[float], far: Sequence[float], x: Tensor) -> Tensor:
    """The series of a Bessel function without its exponential, for |x|."""
    size = x.abs().to(torch.float64)
    least = 0.0 if x.dtype == torch.float64 else _LEAST
    inside = _series(near, size / 2 - 2, least)
    outside = _series(far, 32 / size - 2, least) / size.sqrt()
    if near is _I1E_A:
        inside = inside * size
    return torch.where(size <= 8, inside, outside)


def _series(factors: Sequence[float], x: Tensor, least: float) -> Tensor:
    """Clenshaw's sum of a series whose last term comes first."""
    one: Any = 0.0
    two: Any = 0.0
    before: Any = 0.0
    for factor in factors:
        if abs(factor) >= least:
            one, two, before = x * one - two + factor, one, two
    result: Tensor = 0.5 * (one - before)
    return result


def _grown(x: Tensor, found: Tensor) -> Tensor:
    """With the exponential, which torch computes in fp32 and so makes infinite, or NaN."""
    wide = x.abs() if x.dtype == torch.float64 else x.abs().to(torch.float32)
    grown = wide.exp()
    result = found * wide.to(torch.float64).exp()
    return torch.where(grown == math.inf, (grown / wide.sqrt()).to(torch.float64), result)


def _i0(x: Tensor) -> Tensor:
    x = _real(x)
    return _grown(x, _bessel(_I0E_A, _I0E_B, x)).to(x.dtype)


def _i0e(x: Tensor) -> Tensor:
    x = _real(x)
    return _bessel(_I0E_A, _I0E_B, x).to(x.dtype)


def _i1(x: Tensor) -> Tensor:
    x = _real(x)
    found = _grown(x, _bessel(_I1E_A, _I1E_B, x))
    return torch.where(x < 0, found.neg(), found).to(x.dtype)


def _i1e(x: Tensor) -> Tensor:
    x = _real(x)
    found = _bessel(_I1E_A, _I1E_B, x)
    return torch.where(x < 0, found.neg(), found).to(x.dtype)


def _real(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


SPECIAL: Mapping[Any, Callable[..., Tensor]] = {
    aten.lgamma.default: _lgamma,
    aten.special_gammaln.default: _lgamma,
    aten.digamma.default: _digamma,
    aten.special_digamma.default: _digamma,
    aten.special_psi.default: _digamma,
    aten.erfinv.default: _erfinv,
    aten.special_erfinv.default: _erfinv,
    aten.special_ndtri.default: _ndtri,
    aten.i0.default: _i0,
    aten.special_i0.default: _i0,
    aten.special_i0e.default: _i0e,
    aten.special_i1.default: _i1,
    aten.special_i1e.default: _i1e,
}
"""Op -> its formula."""
