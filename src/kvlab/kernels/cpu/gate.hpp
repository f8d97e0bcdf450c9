// The gate of a feed-forward: activation(x) * up (Shazeer, 2020).
#pragma once

#include "simd.hpp"

namespace {

// x * sigmoid(y), y at least -80. What is rounded to bfloat16 does not need more than a rough one.
template <class Element>
INLINE Floats times_sigmoid(Floats x, Floats y) {
    if constexpr (sizeof(Element) == 4) return x / (1.0f + exponential(-y));
    return x * rough_inverse(1.0f + rough_exponential(-y));
}

// Each step rounded to Element, but for the last.
template <class Element>
INLINE Floats gated(Floats x, Floats up, bool gelu) {
    // gelu in its tanh form is x * sigmoid(2 y), silu is x * sigmoid(x)
    const Floats y = gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
    return rounded<Element>(times_sigmoid<Element>(x, y < -80.0f ? all(-80.0f) : y)) * up;  // e^80 is finite
}

}  // namespace
