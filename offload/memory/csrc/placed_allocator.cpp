// An allocator over PyTorch's own for the CPU: see placed.h. It is never taken out again, because a
// process allocates from its first line on and may free until its last.

#include "placed.h"

namespace {

struct PlacedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = take_planned(nbytes);
    return address ? c10::DataPtr(address, address, &leave, c10::DeviceType::CPU) : pass(nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return base->raw_deleter() ? &release : nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    base->copy_data(to, from, nbytes);
  }
};

} // namespace

extern "C" {

// Called once in a process. No priority is higher, so nobody can replace it unnoticed.
int placed_install() {
  if (!base) {
    static PlacedAllocator allocator;
    base = c10::GetAllocator(c10::DeviceType::CPU);
    c10::SetAllocator(c10::DeviceType::CPU, &allocator, 255);
    mind_forks();
  }
  return 0;
}

} // extern "C"
