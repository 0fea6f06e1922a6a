// Puts a CPU kernel in the place of every CUDA op of aten: by fallback.h, or, where the CPU's
// kernel will not do, by an own function. Views and what makes memory stay CUDA's: they start no
// kernel.
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>

#include "attention.h"
#include "batch_norm.h"
#include "copies.h"
#include "fallback.h"
#include "small_ops.h"

namespace fake_ops {
namespace {

using c10::DispatchKey;

const std::set<std::string> STAY = {
    "_efficientzerotensor",
    "_fused_sdp_choice",
    "_has_same_storage_numel",
    "_local_scalar_dense",
    "_nested_tensor_from_tensor_list",
    "_pin_memory",
    "_reshape_alias",
    "alias",
    "as_strided",
    "empty.memory_format",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "record_stream",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "set_data",
    "unfold",
    "view",
    "view.dtype",
    "view_as_complex",
    "view_as_real",
};

// They have no CUDA kernel of their own: what they choose among has none here.
const std::set<std::string> ALSO = {"_convolution", "convolution"};

const std::string PREFIX = "aten::";

bool has_cpu_kernel(const c10::OperatorHandle& op) {
  for (auto key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd,
                   DispatchKey::CompositeExplicitAutogradNonFunctional,
                   DispatchKey::CompositeImplicitAutograd}) {
    if (op.hasKernelForDispatchKey(key)) return true;
  }
  return false;
}

// Returns the names of those that are installed, without "aten::".
std::set<std::string> install_own(torch::Library& library) {
  std::set<std::string> names;
  auto own = [&](const char* name, auto&& function) {
    library.impl(name, std::forward<decltype(function)>(function));
    names.insert(name);
  };
  own("copy_", TORCH_FN(copy_));
  own("addcdiv_", TORCH_FN(addcdiv_));
  own("_foreach_addcdiv_.Scalar", TORCH_FN(foreach_addcdiv_scalar));
  own("_foreach_addcdiv_.ScalarList", TORCH_FN(foreach_addcdiv_scalars));
  own("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
  own("cudnn_batch_norm", TORCH_FN(batch_norm));
  own("cudnn_batch_norm_backward", TORCH_FN(batch_norm_backward));
  own("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  own("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  own("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  own("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  own("_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn_attention));
  own("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_attention_backward));
  return names;
}

int install_others(torch::Library& library, const std::set<std::string>& own) {
  const bool tell = std::getenv("FAKE_CUDA_LIST") != nullptr;
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& whole : dispatcher.getAllOpNames()) {
    if (whole.name.rfind(PREFIX, 0) != 0) continue;
    std::string name = whole.name.substr(PREFIX.size());
    if (!whole.overload_name.empty()) name += "." + whole.overload_name;
    if (STAY.count(name) || own.count(name)) continue;
    const auto op = dispatcher.findSchema(whole);
    if (!op) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) && !ALSO.count(name)) continue;
    if (!has_cpu_kernel(*op)) {
      if (tell) std::fprintf(stderr, "[fakecuda] %s has no CPU kernel\n", name.c_str());
      continue;
    }
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    ++count;
  }
  return count;
}

// Torch warns of each kernel that takes another's place, which is the purpose here.
class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace
}  // namespace fake_ops

// Once a process. Returns the number of ops that run by the fallback.
extern "C" __attribute__((visibility("default"))) int fakecuda_install_ops() {
  static std::unique_ptr<torch::Library> library;
  if (library) return 0;
  fake_ops::Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                             __FILE__, __LINE__);
  return fake_ops::install_others(*library, fake_ops::install_own(*library));
}
