// The devices, and which of them each thread uses.
#pragma once

namespace fake {

inline constexpr int MOST_DEVICES = 16;

int current_device();

}  // namespace fake
