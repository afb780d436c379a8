// Filters of one channel a group that another direction's product reads as they lie.
#pragma once

#include "shared_memory.cuh"

// Where the product's tap (r, s) lies in a filter of fprop, which has FILTER_TAPS taps (in_place_words in window.py).
template <class P> DEVICE constexpr int place_in_filter(int r, int s) {
    return P::FILTER_FIRST + r * P::FILTER_ROW + s * P::FILTER_COLUMN;
}
