// A device of PyTorch's that is no CPU, "second:0", for tests on machines without a GPU. Its memory is the CPU's and
// the CPU computes, but as on CUDA an operation on tensors of both devices is an error, and so are kernels that are
// written for the CPU. Copies, scalars and indices may cross over, as there.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::IntArrayRef;
constexpr auto SECOND = c10::DeviceType::PrivateUse1;
const c10::Device HERE(SECOND, 0);

// Memory -------------------------------------------------------------------------------------------------------

void release(void* memory) { std::free(memory); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* made = nullptr;
    if (posix_memalign(&made, 64, std::max<size_t>(bytes, 64))) throw std::bad_alloc();
    return {made, made, &release, HERE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Memory memory;
REGISTER_ALLOCATOR(SECOND, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = SECOND;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return SECOND; }
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

bool is_here(const Tensor& t) { return t.defined() && t.device().type() == SECOND; }

// A tensor of the CPU on the same memory.
Tensor on_cpu(const Tensor& t) {
  if (!is_here(t)) return t;
  auto* own = t.storage().unsafeGetStorageImpl();
  c10::DataPtr at(const_cast<void*>(own->data()), c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), own->nbytes(), std::move(at), nullptr, false);
  const auto made = at::empty({0}, at::TensorOptions().dtype(t.scalar_type()));
  return made.set_(storage, t.storage_offset(), t.sizes(), t.strides());
}

Tensor moved_here(const Tensor& t) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(HERE)).copy_(t) : t;
}

// Operations that make, view and copy tensors --------------------------------------------------------------------

Tensor empty(IntArrayRef sizes, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &memory, keys, c10::dtype_or_default(type), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<c10::ScalarType> type,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &memory, keys, c10::dtype_or_default(type));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (from.numel()) on_cpu(to).copy_(on_cpu(from));
  return to;
}

const Tensor& resize_(const Tensor& t, IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  at::native::resize_impl_cpu_(t.unsafeGetTensorImpl(), sizes, std::nullopt);
  if (format && *format != c10::MemoryFormat::Preserve) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return t;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  return copy_from(from, resize_(to, from.sizes(), std::nullopt), false);
}

at::Scalar local_scalar(const Tensor& t) { return on_cpu(t).item(); }

Tensor& set_storage(Tensor& t, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::set_storage_cpu_(t, std::move(storage), offset, sizes, strides);
}

// Convolutions, which PyTorch chooses by device before it calls an operation ----------------------------------------

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const bool has_bias = bias && bias->defined();
  TORCH_CHECK(is_here(x) && is_here(weight) && (!has_bias || is_here(*bias)), "convolution: tensors of two devices");
  const auto b = has_bias ? std::optional<Tensor>(on_cpu(*bias)) : std::nullopt;
  return moved_here(at::convolution(on_cpu(x), on_cpu(weight), b, stride, padding, dilation, transposed,
                                    output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                        bool transposed, IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  TORCH_CHECK(is_here(x) && is_here(weight) && is_here(grad), "convolution_backward: tensors of two devices");
  const std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [of_x, of_weight, of_bias] =
      at::convolution_backward(on_cpu(grad), on_cpu(x), on_cpu(weight), c10::OptionalIntArrayRef(bias), stride, padding,
                               dilation, transposed, output_padding, groups, wanted);
  return {moved_here(of_x), moved_here(of_weight), moved_here(of_bias)};
}

// All other operations ------------------------------------------------------------------------------------------

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = op.schema().name();
  const auto count = op.schema().arguments().size(), first = stack->size() - count;
  bool here = false, there = false, made_here = false;
  auto look = [&](const Tensor& t) {
    here |= is_here(t);
    there |= t.defined() && !is_here(t) && t.dim() > 0;
  };
  for (size_t i = 0; i < count; i++) {
    const auto& given = (*stack)[first + i];
    if (given.isTensor()) look(given.toTensor());
    if (given.isTensorList())
      for (const auto& t : given.toTensorVector()) look(t);
    if (given.isDevice()) made_here |= given.toDevice().type() == SECOND;
  }
  TORCH_CHECK(name.rfind("aten::", 0) == 0, name, ": a kernel of the CPU");
  TORCH_CHECK(!(here && there), name, ": tensors of two devices");
  for (const auto& argument : op.schema().arguments())
    if (argument.is_out()) return at::native::cpu_fallback(op, stack, false);

  std::vector<std::pair<Tensor, Tensor>> views;
  auto view = [&](const Tensor& t) {
    if (!is_here(t)) return t;
    views.emplace_back(t, on_cpu(t));
    return views.back().second;
  };
  for (size_t i = 0; i < count; i++) {
    auto& given = (*stack)[first + i];
    if (given.isTensor()) {
      given = view(given.toTensor());
    } else if (given.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& t : given.toTensorVector()) list.push_back(view(t));
      given = list;
    } else if (given.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : given.toOptionalTensorList())
        list.push_back(t ? std::optional<Tensor>(view(*t)) : t);
      given = list;
    } else if (given.isDevice() && made_here) {
      given = c10::Device(c10::DeviceType::CPU);
    }
  }
  op.callBoxed(stack);
  auto back = [&](const Tensor& t) {
    for (const auto& [own, cpu] : views)
      if (cpu.is_same(t)) return own;
    return here || made_here ? moved_here(t) : t;
  };
  const auto results = op.schema().returns().size(), last = stack->size() - results;
  for (size_t i = 0; i < results; i++) {
    auto& result = (*stack)[last + i];
    if (result.isTensor()) {
      result = back(result.toTensor());
    } else if (result.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& t : result.toTensorVector()) list.push_back(back(t));
      result = list;
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }
