"""Rational functions over the rationals, with square roots of primes: exact, bounded arithmetic for verifiers.

A polynomial maps monomials to coefficients; a monomial is a sorted tuple of (atom, exponent). Atoms are variables,
constants that no polynomial equation over the rationals connects as far as is known (π, e), and √p for primes p, with
√p² = p. Two quotients a/b and c/d are equal if and only if a·d − c·b is the zero polynomial, because the roots of
distinct primes are linearly independent over the rationals with all their products (Besicovitch 1940).

Every operation is bounded in terms, exponents and digits, and raises `TooLargeError` beyond.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

TERMS, EXPONENT, BITS = 400, 64, 8192
"""Bounds on a polynomial's terms, on exponents, and on the bits of a numerator or denominator."""
_LARGEST_ROOT = 10**10
"""Of an integer whose square root is taken: trial division up to 10⁵."""

Monomial = tuple[tuple[str, int], ...]
Polynomial = dict[Monomial, Fraction]


class TooLargeError(ValueError):
    """An expression whose exact value is too large to compute with."""


@dataclass(frozen=True)
class Quotient:
    """A rational function; the denominator is not the zero polynomial."""

    above: Polynomial
    below: Polynomial

    def __add__(self, other: Quotient) -> Quotient:
        if self.below == other.below:
            return quotient(_plus(self.above, other.above), self.below)
        above = _plus(_times(self.above, other.below), _times(other.above, self.below))
        return quotient(above, _times(self.below, other.below))

    def __neg__(self) -> Quotient:
        return Quotient({monomial: -factor for monomial, factor in self.above.items()}, self.below)

    def __sub__(self, other: Quotient) -> Quotient:
        return self + -other

    def __mul__(self, other: Quotient) -> Quotient:
        return quotient(_times(self.above, other.above), _times(self.below, other.below))

    def __truediv__(self, other: Quotient) -> Quotient:
        if not other.above:
            raise ZeroDivisionError("division by zero")
        return quotient(_times(self.above, other.below), _times(self.below, other.above))

    def power(self, exponent: int) -> Quotient:
        """Raises TooLargeError beyond the bounds, ZeroDivisionError for a negative power of zero."""
        if abs(exponent) > EXPONENT:
            raise TooLargeError(f"the exponent {exponent} is larger than {EXPONENT}")
        result = constant(1)
        for _ in range(abs(exponent)):
            result = result * self
        return constant(1) / result if exponent < 0 else result

    def equals(self, other: Quotient) -> bool:
        """Whether both are the same function. Raises TooLargeError."""
        return not (self - other).above

    @property
    def rational(self) -> Fraction | None:
        """Its value, if it is a rational number in lowest terms."""
        if set(self.above) <= {()} and set(self.below) == {()}:
            return self.above.get((), Fraction(0)) / self.below[()]
        return None


def constant(value: int | Fraction) -> Quotient:
    """A rational number."""
    return Quotient({(): Fraction(value)} if value else {}, {(): Fraction(1)})


def atom(name: str) -> Quotient:
    """A variable, or a constant that stands for itself."""
    return Quotient({((name, 1),): Fraction(1)}, {(): Fraction(1)})


def quotient(above: Polynomial, below: Polynomial) -> Quotient:
    """A quotient with numbers divided out. Raises TooLargeError."""
    for polynomial in (above, below):
        if len(polynomial) > TERMS:
            raise TooLargeError(f"an expression has more than {TERMS} terms")
        for monomial, factor in polynomial.items():
            if max(factor.numerator.bit_length(), factor.denominator.bit_length()) > BITS:
                raise TooLargeError(f"a number has more than {BITS} bits")
            if any(exponent > EXPONENT for _, exponent in monomial):
                raise TooLargeError(f"an exponent is larger than {EXPONENT}")
    if set(below) == {()}:
        return Quotient(
            {monomial: factor / below[()] for monomial, factor in above.items()}, {(): Fraction(1)}
        )
    return Quotient(above, below)


def square_root(value: Fraction) -> Quotient:
    """√(a/b) = √(a·b) / b as an integer times roots of primes. Raises ValueError below 0, TooLargeError."""
    if value < 0:
        raise ValueError("the square root of a negative number")
    number = value.numerator * value.denominator
    whole = _exact_root(number)
    if whole is not None:
        return constant(Fraction(whole, value.denominator))
    if number > _LARGEST_ROOT:
        raise TooLargeError(f"the square root of a number larger than {_LARGEST_ROOT}")
    outside, roots, divisor = 1, [], 2
    while number > 1:
        if divisor * divisor > number:
            divisor = number
        count = 0
        while number % divisor == 0:
            number //= divisor
            count += 1
        outside *= divisor ** (count // 2)
        if count % 2:
            roots.append((f"√{divisor}", 1))
        divisor += 1
    return Quotient({tuple(sorted(roots)): Fraction(outside, value.denominator)}, {(): Fraction(1)})


def _exact_root(number: int) -> int | None:
    from math import isqrt

    root = isqrt(number)
    return root if root * root == number else None


def _plus(left: Polynomial, right: Polynomial) -> Polynomial:
    total = dict(left)
    for monomial, factor in right.items():
        total[monomial] = total.get(monomial, Fraction(0)) + factor
    return {monomial: factor for monomial, factor in total.items() if factor}


def _times(left: Polynomial, right: Polynomial) -> Polynomial:
    if len(left) * len(right) > TERMS * TERMS // 4:
        raise TooLargeError(f"a product has more than {TERMS * TERMS // 4} terms")
    total: Polynomial = {}
    for first, one in left.items():
        for second, other in right.items():
            monomial, factor = _joined(first, second)
            total[monomial] = total.get(monomial, Fraction(0)) + one * other * factor
    return {monomial: factor for monomial, factor in total.items() if factor}


def _joined(first: Monomial, second: Monomial) -> tuple[Monomial, int]:
    """The product of two monomials, and the number that squares of roots leave."""
    exponents = dict(first)
    for name, exponent in second:
        exponents[name] = exponents.get(name, 0) + exponent
    factor = 1
    for name, exponent in exponents.items():
        if name.startswith("√"):
            factor *= int(name[1:]) ** (exponent // 2)
            exponents[name] = exponent % 2
    return tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent)), factor
