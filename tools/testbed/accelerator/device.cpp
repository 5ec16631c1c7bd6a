// A CUDA device for a build of PyTorch without CUDA: its memory is the host's, its kernels are those of the CPU.
//
// Tensors on it have the device cuda:N, with the allocator, guard, hooks, pinned memory and generators of that device.
// One boxed fallback takes every operation. It lends the memory of the arguments to the kernel of the CPU, refuses
// what CUDA refuses, and tells an observer of launches, copies and waits. Copies into pinned memory hold poison until
// their stream is waited for. A copy that a stream carries out before it has waited for the writer of its source is
// told as a race, and its result stays poison.
//
// It models one thing that a CPU cannot show: where work runs. It says nothing of numerics and nothing of time.
#include <torch/extension.h>  // before those of ATen's kernels, which need its declarations

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TensorConversions.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace simulated {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using StreamId = int64_t;  // 0 is the default stream of every device

constexpr int FRESH = 0xCD;     // what new memory of the device holds
constexpr int POISON = 0xAB;    // what pinned memory holds while a copy into it is under way
constexpr size_t BLOCK = 512;   // bytes, to which an allocation is rounded up

// State. `lock` guards it, except for what belongs to one thread. Nothing of it is destroyed: tensors may end later.

auto& lock = *new std::mutex;
int device_count = 1;
int64_t memory_limit = int64_t(80) << 30;
auto& contexts = *new std::set<DeviceIndex>;  // devices that this process has touched; each costs half a GB on a real one
auto& live = *new std::map<DeviceIndex, int64_t>;
auto& peak = *new std::map<DeviceIndex, int64_t>;
std::atomic<StreamId> next_stream{1};
PyObject* observer = nullptr;
thread_local DeviceIndex current = 0;
thread_local std::map<DeviceIndex, StreamId> current_stream;

void tell(const char* kind, const std::string& what, int64_t bytes = 0) {
  if (!observer) return;
  py::gil_scoped_acquire gil;
  py::handle{observer}(std::string(kind), what, bytes);
}

void make_context(DeviceIndex device) {
  std::lock_guard<std::mutex> guard(lock);
  contexts.insert(device);
}

StreamId stream_of(DeviceIndex device) {
  auto found = current_stream.find(device);
  return found == current_stream.end() ? 0 : found->second;
}

Device on_device(DeviceIndex index) { return Device(DeviceType::CUDA, index); }
Device with_index(std::optional<Device> device) {
  return device && device->has_index() ? *device : on_device(current);
}

// Order of work. Every launch has a number on its stream; a stream knows up to which number it has waited for others.

struct Block {
  int64_t size;
  DeviceIndex device;
  StreamId writer = 0;
  int64_t written = 0;  // number of the last launch that wrote to it
};
auto& blocks = *new std::unordered_map<const void*, Block>;  // by their start
auto& launched = *new std::map<StreamId, int64_t>;
auto& waited = *new std::map<StreamId, std::map<StreamId, int64_t>>;  // stream -> other stream -> number
auto& known_to_host = *new std::map<StreamId, int64_t>;               // work that ended before the host continued
auto& pending = *new std::map<StreamId, std::deque<std::function<void()>>>;

int64_t mark(StreamId stream) {
  std::lock_guard<std::mutex> guard(lock);
  return launched[stream];
}

void wait_for(StreamId stream, StreamId other, int64_t number) {
  std::lock_guard<std::mutex> guard(lock);
  auto& upto = waited[stream][other];
  upto = std::max(upto, number);
}

void wrote(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage()) return;
  const auto stream = stream_of(tensor.device().index());
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks.find(tensor.storage().data());
  if (found == blocks.end()) return;
  found->second.writer = stream;
  found->second.written = launched[stream];
}

// Whether `stream` may read this memory now: it has waited for the stream that wrote it, or the host has.
bool is_ordered(const Tensor& tensor, StreamId stream) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks.find(tensor.storage().data());
  if (found == blocks.end() || found->second.writer == stream) return true;
  const auto& block = found->second;
  return std::max(waited[stream][block.writer], known_to_host[block.writer]) >= block.written;
}

void launch(const std::string& name, Device device) {
  {
    std::lock_guard<std::mutex> guard(lock);
    ++launched[stream_of(device.index())];
  }
  tell("launch", name);
}

// The host waits for a stream: what is pending there is carried out.
void finish(StreamId stream) {
  std::deque<std::function<void()>> work;
  {
    std::lock_guard<std::mutex> guard(lock);
    std::swap(work, pending[stream]);
    known_to_host[stream] = launched[stream];
  }
  for (auto& each : work) each();
}

// Memory

size_t rounded(size_t size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }

void free_block(void* start) {
  if (!start) return;
  {
    std::lock_guard<std::mutex> guard(lock);
    const auto& block = blocks[start];
    live[block.device] -= block.size;
    blocks.erase(start);
  }
  std::free(start);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    make_context(current);
    if (wanted == 0) return {nullptr, nullptr, &free_block, on_device(current)};
    const auto size = rounded(wanted);
    {
      std::lock_guard<std::mutex> guard(lock);
      const auto free = memory_limit - live[current];
      if (int64_t(size) > free)
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size >> 20, " MiB. GPU ",
                         int(current), " has a total capacity of ", memory_limit >> 20, " MiB of which ", free >> 20,
                         " MiB is free (simulated).");
    }
    void* start = std::aligned_alloc(BLOCK, size);
    TORCH_CHECK(start, "this machine has no memory for the simulated device");
    std::memset(start, FRESH, size);
    std::lock_guard<std::mutex> guard(lock);
    blocks[start] = {int64_t(size), current};
    live[current] += size;
    peak[current] = std::max(peak[current], live[current]);
    return {start, start, &free_block, on_device(current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
DeviceAllocator device_allocator;

auto& pinned = *new std::map<const char*, size_t>;  // start -> size

void free_pinned(void* start) {
  if (!start) return;
  {
    std::lock_guard<std::mutex> guard(lock);
    pinned.erase(static_cast<const char*>(start));
  }
  std::free(start);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    if (wanted == 0) return {nullptr, nullptr, &free_pinned, Device(DeviceType::CPU)};
    void* start = std::aligned_alloc(BLOCK, rounded(wanted));
    std::lock_guard<std::mutex> guard(lock);
    pinned[static_cast<const char*>(start)] = rounded(wanted);
    return {start, start, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* address) {
  const auto* place = static_cast<const char*>(address);
  std::lock_guard<std::mutex> guard(lock);
  auto after = pinned.upper_bound(place);
  if (after == pinned.begin()) return false;
  const auto& [start, size] = *--after;
  return place < start + size;
}

// The current device belongs to a thread. A context appears where CUDA 12 makes one, which is in cudaSetDevice.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return on_device(current); }
  void setDevice(Device device) const override {
    if (device.index() == current) return;
    current = device.index();
    make_context(current);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Stream stream(DeviceIndex device, StreamId id) const { return Stream(Stream::UNSAFE, on_device(device), id); }
  Stream getStream(Device device) const override {
    const auto index = with_index(device).index();
    return stream(index, stream_of(index));
  }
  Stream getDefaultStream(Device device) const override { return stream(with_index(device).index(), 0); }
  Stream getNewStream(Device device, int) const override { return stream(device.index(), next_stream++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream to) const override {
    const auto before = stream(to.device_index(), stream_of(to.device_index()));
    current_stream[to.device_index()] = to.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count); }
  // Autograd orders its streams with these; it always waits, so nothing of it can be a race.
  void record(void**, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream& stream) const override { wait_for(stream.id(), 0, mark(0)); }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override {
    tell("wait", "stream");
    finish(stream.id());
  }
  void synchronizeEvent(void*) const override { tell("wait", "event"); }
  void synchronizeDevice(const DeviceIndex) const override {
    tell("wait", "device");
    finish(0);
  }
};

// Generators are those of the CPU under another name. A kernel gets a CPU generator with the same state.

struct Generator final : at::CPUGeneratorImpl {
  Generator(DeviceIndex index, uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = on_device(index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

Tensor state_of(const at::Generator& generator) {
  return Tensor::wrap_tensor_impl(generator.unsafeGetGeneratorImpl()->get_state());
}

at::Generator on_host(const at::Generator& outer) {
  auto inner = at::make_generator<at::CPUGeneratorImpl>(outer.current_seed());
  inner.set_state(state_of(outer));
  return inner;
}

at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<Generator>(index < 0 ? current : index, uint64_t(c10::default_rng_seed_val));
}

const at::Generator& default_generator(DeviceIndex index) {
  static std::map<DeviceIndex, at::Generator> defaults;
  if (index < 0) index = current;
  std::lock_guard<std::mutex> guard(lock);
  auto found = defaults.find(index);
  return found != defaults.end() ? found->second : defaults.emplace(index, new_generator(index)).first->second;
}

struct Hooks final : at::CUDAHooksInterface {
  Hooks() = default;
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  std::string showConfig() const override { return "simulated CUDA"; }
  bool hasPrimaryContext(DeviceIndex device) const override {
    std::lock_guard<std::mutex> guard(lock);
    return contexts.count(device);
  }
  DeviceIndex deviceCount() const override { return DeviceIndex(device_count); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override {
    current = device;
    make_context(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = current;
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    const auto before = current;
    current = device;
    return before;
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
  Device getDeviceFromPtr(void* start) const override {
    std::lock_guard<std::mutex> guard(lock);
    auto found = blocks.find(start);
    return on_device(found == blocks.end() ? current : found->second.device);
  }
};

// Tensors between device and host

// The same memory as a tensor of the CPU.
Tensor lend(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto keep = tensor.storage();
  auto lent = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                            [keep](void*) {}, options);
  if (tensor.is_conj()) lent = lent.conj();
  if (tensor.is_neg()) lent._set_neg(true);
  return lent;
}

// A result of the CPU in new memory of the device.
Tensor take(const Tensor& tensor, Device device) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  c10::OptionalDeviceGuard guard(device);
  const auto options = tensor.options().device(device).pinned_memory(false);
  auto taken = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  if (tensor.numel()) lend(taken).copy_(tensor);
  wrote(taken);
  return taken;
}

void refuse_other_device(const std::string& name, const Tensor& tensor, Device device) {
  if (!tensor.defined() || tensor.device() == device) return;
  if (tensor.device().is_cpu() && tensor.dim() == 0) return;  // CUDA takes a number of the host
  tell("mix", name);
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
              tensor.device(), "! (", name, ")");
}

// The call of one operation: its arguments are lent to the CPU's kernel, and what comes back belongs to the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), begin_(stack->size() - schema_.arguments().size()),
        given_(stack->begin() + begin_, stack->end()), device_(find_device()) {}

  void run() {
    for (size_t i = 0; i < given_.size(); ++i) (*stack_)[begin_ + i] = lent(i, given_[i]);
    launch(schema_.name(), device_);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (auto& [whole, part] : empty_outputs_) grow(whole, part);
    for (size_t i = 0; i < given_.size(); ++i) note_written(i);
    for (auto& [outer, inner] : generators_) outer.set_state(state_of(inner));
    const auto first = stack_->size() - schema_.returns().size();
    for (size_t r = 0; r < schema_.returns().size(); ++r) give_back((*stack_)[first + r], r);
  }

 private:
  Device find_device() const {
    std::optional<Device> named;
    for (const auto& value : given_) {
      for (const auto& tensor : tensors_of(value))
        if (tensor.defined() && tensor.is_cuda()) return tensor.device();
      if (value.isDevice() && !named && value.toDevice().is_cuda()) named = value.toDevice();
    }
    return with_index(named);
  }

  static std::vector<Tensor> tensors_of(const c10::IValue& value) {
    if (value.isTensor()) return {value.toTensor()};
    if (value.isTensorList()) return value.toTensorVector();
    std::vector<Tensor> found;
    if (value.isOptionalTensorList())
      for (const auto& each : value.toOptionalTensorVector())
        if (each) found.push_back(*each);
    return found;
  }

  bool is_written(size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  Tensor lent_tensor(const Tensor& tensor) {
    refuse_other_device(schema_.name(), tensor, device_);
    return lend(tensor);
  }

  c10::IValue lent(size_t i, const c10::IValue& value) {
    if (value.isTensor()) {
      auto whole = value.toTensor();
      auto part = lent_tensor(whole);
      if (is_written(i) && whole.defined() && whole.is_cuda() && whole.numel() == 0)
        empty_outputs_.emplace_back(whole, part);
      return part;
    }
    if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = lent_tensor(tensor);
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& index : value.toOptionalTensorVector()) list.push_back(index ? lent_index(*index) : index);
      return list;
    }
    if (value.isDevice()) return Device(DeviceType::CPU);
    return value.isGenerator() ? lent_generator(value.toGenerator()) : value;
  }

  // An index may be on the host, and is copied; how many places a boolean one means, the host has to be told.
  std::optional<Tensor> lent_index(const Tensor& index) {
    if (index.is_cpu()) tell("wait", "an index on the host");
    else refuse_other_device(schema_.name(), index, device_);
    if (index.is_cuda() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte))
      tell("wait", "a boolean index");
    return lend(index);
  }

  c10::IValue lent_generator(const at::Generator& outer) {
    TORCH_CHECK(outer.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu' (",
                schema_.name(), ")");
    generators_.emplace_back(outer, on_host(outer));
    return generators_.back().second;
  }

  static void grow(Tensor& whole, const Tensor& part) {
    if (part.sizes() == whole.sizes()) return;
    whole.resize_(part.sizes());
    lend(whole).copy_(part);
  }

  void note_written(size_t i) const {
    if (!is_written(i)) return;
    for (const auto& tensor : tensors_of(given_[i])) wrote(tensor);
  }

  void give_back(c10::IValue& value, size_t r) const {
    const auto* alias = schema_.returns()[r].alias_info();
    if (alias && alias->isWrite()) {  // it is an argument
      for (size_t i = 0; i < given_.size(); ++i)
        if (is_written(i) && schema_.arguments()[i].alias_info()->beforeSets() == alias->beforeSets())
          value = given_[i];
    } else if (value.isTensor()) {
      value = take(value.toTensor(), device_);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = take(tensor, device_);
      value = list;
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t begin_;
  std::vector<c10::IValue> given_;
  Device device_;
  std::vector<std::pair<Tensor, Tensor>> empty_outputs_;
  std::vector<std::pair<at::Generator, at::Generator>> generators_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// What the fallback cannot do: memory, views, copies, and reading on the host

constexpr auto CUDA_KEY = c10::DispatchKey::CUDA;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;

Tensor empty(c10::IntArrayRef size, Dtype dtype, Layout, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(with_index(device));
  const c10::DispatchKeySet keys(CUDA_KEY);
  return at::detail::empty_generic(size, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout, std::optional<Device> device,
                     std::optional<bool>) {
  c10::DeviceGuard guard(with_index(device));
  const c10::DispatchKeySet keys(CUDA_KEY);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}

int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * int64_t(tensor.element_size()); }

void copy_from_host(Tensor& self, const Tensor& source, bool non_blocking) {
  const std::string memory = is_pinned(source.const_data_ptr()) ? "pinned" : "pageable";
  tell(("h2d " + memory + (non_blocking ? " async" : " blocking")).c_str(), "aten::copy_", bytes_of(self));
  lend(self).copy_(source.expand(self.sizes()));
  wrote(self);
}

// The copy is carried out when its stream is waited for. On the default stream it sees what was queued before it.
void copy_later(Tensor& self, const Tensor& source, StreamId stream) {
  tell("d2h pinned async", "aten::copy_", bytes_of(self));
  if (self.is_non_overlapping_and_dense()) std::memset(self.mutable_data_ptr(), POISON, bytes_of(self));
  if (!is_ordered(source, stream)) {
    tell("race", "a copy of memory whose writer this stream has not waited for", bytes_of(self));
    return;
  }
  auto target = self.alias();
  auto from = stream == 0 ? lend(source).clone() : lend(source);
  std::lock_guard<std::mutex> guard(lock);
  pending[stream].push_back([target, from]() mutable {
    c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    target.copy_(from);
  });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() && source.is_cuda()) {
    // As `copy_impl` in Copy.cpp: `baddbmm_` copies its own result to itself, which starts nothing.
    if (self.is_alias_of(source) && self.storage_offset() == source.storage_offset() &&
        self.sizes() == source.sizes() && self.strides() == source.strides() &&
        self.scalar_type() == source.scalar_type())
      return self;
    launch("aten::copy_", self.device());
    lend(self).copy_(lend(source));
    wrote(self);
  } else if (self.is_cuda()) {
    copy_from_host(self, source, non_blocking);
  } else {
    const auto stream = stream_of(source.device().index());
    if (non_blocking && self.numel() && is_pinned(self.const_data_ptr())) {
      copy_later(self, source, stream);
    } else {
      tell(non_blocking ? "d2h pageable async" : "d2h blocking", "aten::copy_", bytes_of(self));
      finish(stream);
      self.copy_(lend(source));
    }
  }
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  tell("wait", "a number is read");
  finish(stream_of(self.device().index()));
  return at::_local_scalar_dense(lend(self));
}

bool equal(const Tensor& one, const Tensor& other) {
  refuse_other_device("aten::equal", other, one.device());
  launch("aten::equal", one.device());
  tell("wait", "torch.equal");
  return at::equal(lend(one), lend(other));
}

// RMSNorm, which CUDA computes by a kernel for each direction, and the CPU by others.
using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, c10::IntArrayRef shape, const Optional& weight,
                                    std::optional<double> epsilon) {
  launch("aten::_fused_rms_norm", x.device());
  const auto wide = lend(x).to(at::promote_types(x.scalar_type(), at::kFloat));
  const auto scale = wide.square().mean(-1, true).add(epsilon.value()).rsqrt();
  return {take((wide * scale * lend(*weight)).to(x.scalar_type()), x.device()), take(scale, x.device())};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, c10::IntArrayRef shape,
                                             const Tensor& scale, const Optional& weight, std::array<bool, 2> mask) {
  TORCH_CHECK(mask[0] && !mask[1], "only the gradient of the input is simulated");
  launch("aten::_fused_rms_norm_backward", x.device());
  const auto wide = lend(grad).to(scale.scalar_type()) * lend(*weight);
  const auto normed = lend(x) * lend(scale);
  const auto found = (wide - normed * (wide * normed).mean(-1, true)) * lend(scale);
  return {take(found.to(x.scalar_type()), x.device()), Tensor()};
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  return set_storage(self, source, 0, {int64_t(source.nbytes() / self.itemsize())}, {int64_t(1)});
}

void resize_storage(const Tensor& tensor, size_t size) {
  auto storage = tensor.storage();
  c10::DeviceGuard guard(tensor.device());
  auto fresh = device_allocator.allocate(size);
  if (const auto common = std::min(size, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), common);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(size);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self, needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("equal", &equal);
  library.impl("as_strided", &as_strided);
  library.impl("view", [](const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  library.impl("_reshape_alias", [](const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  library.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
  library.impl("view_as_real", [](const Tensor& self) { return at::native::view_as_real(self); });
  library.impl("view_as_complex", [](const Tensor& self) { return at::native::view_as_complex(self); });
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("resize_", &resize_);
  library.impl("_fused_rms_norm", &rms_norm);
  library.impl("_fused_rms_norm_backward", &rms_norm_backward);
  // A kernel of CUDA, beside which PyTorch also has it in parts.
  library.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace simulated

// PyTorch makes its hooks once, when it first asks for them: this library has to be loaded before it is imported.
using CUDAHooks = simulated::Hooks;
namespace at {
using SimulatedHooks = simulated::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}  // namespace at

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
  static Guard guard;
  module.def("install", [](int devices, int64_t limit) {
    device_count = devices;
    memory_limit = limit;
    c10::SetAllocator(DeviceType::CUDA, &device_allocator, 255);
    c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
    return at::hasCUDA();
  });
  module.def("observe", [](py::object callee) { observer = callee.is_none() ? nullptr : callee.release().ptr(); });
  module.def("lend", &lend);
  module.def("take", [](const Tensor& tensor, int index) { return take(tensor, on_device(index)); });
  module.def("launch", [](const std::string& name) { launch(name, on_device(current)); });
  module.def("set_device", [](int index) { guard.setDevice(on_device(index)); });
  module.def("set_device_without_context", [](int index) { current = index; });
  module.def("current_device", []() { return int(current); });
  module.def("contexts", []() { return std::vector<int>(contexts.begin(), contexts.end()); });
  module.def("new_stream", []() { return next_stream++; });
  module.def("set_stream", [](int device, StreamId id) { current_stream[device] = id; });
  module.def("current_stream", [](int device) { return stream_of(device); });
  module.def("mark", &mark);
  module.def("wait_for", &wait_for);
  module.def("finish", &finish, py::call_guard<py::gil_scoped_release>());
  module.def("live", [](int device) { return live[device]; });
  module.def("peak", [](int device) { return peak[device]; });
  module.def("reset_peak", [](int device) { peak[device] = live[device]; });
  module.def("limit", []() { return memory_limit; });
  module.def("resize_storage", &resize_storage);
  module.def("default_generator", &default_generator);
}
