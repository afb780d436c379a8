// Slots of a ring in shared memory: stages of a pipeline.
#pragma once

#include "shared_memory.cuh"

// The next of COUNT slots of a ring; `phase` turns over with it.
template <int COUNT> DEVICE void advance(int &slot, unsigned &phase, int by = 1) {
    slot += by;
    if (by == 1 ? slot == COUNT : slot >= COUNT) {
        phase ^= slot / COUNT & 1;
        slot %= COUNT;
    }
}
template <int COUNT> DEVICE int before(int slot, int by) { return slot < by ? slot - by + COUNT : slot - by; }
