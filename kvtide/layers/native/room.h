// Aligned floats that a thread keeps between calls: new memory would cost a fault for each page.
#pragma once

#include <cstdint>
#include <vector>

// A thread has one room for each purpose.
template <class Purpose>
inline float* room(int64_t count) {
  static thread_local std::vector<float> memory;
  if ((int64_t)memory.size() < count + 16) memory.resize(count + 16);
  return memory.data() + (-(uintptr_t)memory.data() % 64) / 4;
}
