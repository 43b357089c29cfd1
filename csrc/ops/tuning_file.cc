#include "tuning_file.h"

#include <tvm/ffi/extra/json.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "versions.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

namespace json = tvm::ffi::json;
using tvm::ffi::Any;
using tvm::ffi::String;

constexpr const char* kFormat = "tvm_flashinfer tuning 1";
constexpr size_t kMaxBytes = 4 << 20;
constexpr int kMaxDepth = 8;

// The bits of a key. Shapes that do not fit have no entry.
constexpr int kHeadBits = 12, kHeadDimBits = 10, kBucketBits = 5;
constexpr int64_t kMaxHeads = (1 << kHeadBits) - 1, kMaxHeadDim = (1 << kHeadDimBits) - 1;
constexpr int64_t kMaxSize = int64_t{1} << 30;

/*! \brief The class of a shape, or nothing for one that cannot be in a file. */
std::optional<uint64_t> KeyOf(const ChoiceShape& shape) {
  if (shape.window_left >= 0 || shape.num_qo_heads > kMaxHeads || shape.head_dim_qk > kMaxHeadDim ||
      shape.head_dim_vo > kMaxHeadDim || shape.batch_size < 1) {
    return std::nullopt;
  }
  const int rows = BucketOfMean(shape.num_rows, shape.batch_size);
  const int keys = BucketOfMean(shape.num_keys, shape.batch_size);
  if (keys >= 1 << kBucketBits || rows >= 1 << kBucketBits) return std::nullopt;
  uint64_t key = static_cast<uint64_t>(shape.slot);
  const auto add = [&key](int64_t value, int bits) {
    key = key << bits | static_cast<uint64_t>(value);
  };
  add(shape.causal && rows > 0, 1);  // one row sees the same keys either way
  add(shape.num_qo_heads, kHeadBits);
  add(shape.num_kv_heads, kHeadBits);
  add(shape.head_dim_qk, kHeadDimBits);
  add(shape.head_dim_vo, kHeadDimBits);
  add(Bucket(shape.batch_size), kBucketBits);
  add(rows, kBucketBits);
  add(keys, kBucketBits);
  return key;
}

/*! \brief FNV-1a. It tells files apart, and guards nothing. */
std::string DigestOf(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3u;
  char hex[17];
  std::snprintf(hex, sizeof(hex), "%016llx", static_cast<unsigned long long>(hash));
  return hex;
}

int DepthOf(const std::string& text) {
  int depth = 0, deepest = 0;
  for (char c : text) {
    if (c == '[' || c == '{') deepest = std::max(deepest, ++depth);
    if (c == ']' || c == '}') --depth;
  }
  return deepest;
}

/*! \brief Reads the fields of an object, of which every one must be known. */
class Fields {
 public:
  Fields(const Checker& check, const std::string& source, std::string where, const Any& value,
         std::initializer_list<const char*> known)
      : check_(check), source_(source), where_(std::move(where)) {
    auto object = value.try_cast<json::Object>();
    if (!object.has_value()) Fail("is no JSON object");
    object_ = *object;
    for (const auto& [key, field] : object_) {
      const std::string name = key.cast<String>();
      const auto is = [&](const char* other) { return name == other; };
      if (std::none_of(known.begin(), known.end(), is)) Fail("has a field `" + name + "`");
    }
  }

  Any Value(const char* name) const {
    auto it = object_.find(String(name));
    if (it == object_.end()) Fail(Text("has no `", name, "`"));
    return (*it).second;
  }
  std::string TextOf(const char* name) const {
    auto text = Value(name).as<String>();
    if (!text.has_value()) Fail(Text("has a `", name, "` that is no text"));
    return *text;
  }
  int64_t Integer(const char* name, int64_t low, int64_t high) const {
    auto number = Value(name).as<int64_t>();
    if (!number.has_value() || *number < low || *number > high) {
      Fail(Text("has a `", name, "` that is no integer from ", low, " to ", high));
    }
    return *number;
  }
  /*! \brief A size that stands for its class: those down to the next power of two. */
  int64_t PowerOfTwo(const char* name) const {
    const int64_t size = Integer(name, 1, kMaxSize);
    if ((size & (size - 1)) != 0) Fail(Text("has a `", name, "` of ", size, ", no power of two"));
    return size;
  }
  bool Flag(const char* name) const {
    auto flag = Value(name).as<bool>();
    if (!flag.has_value()) Fail(Text("has a `", name, "` that is neither true nor false"));
    return *flag;
  }
  json::Array List(const char* name) const {
    auto list = Value(name).try_cast<json::Array>();
    if (!list.has_value()) Fail(Text("has a `", name, "` that is no list"));
    return *list;
  }
  /*! \brief The value of an enumeration with these names. */
  template <typename Enum>
  Enum OneOf(const char* name, std::initializer_list<Enum> values) const {
    const std::string got = TextOf(name);
    std::string names;
    for (Enum value : values) {
      if (got == NameOf(value)) return value;
      names += (names.empty() ? "" : ", ") + std::string(NameOf(value));
    }
    Fail(Text("has a `", name, "` of \"", got, "\", expected one of ", names));
  }
  [[noreturn]] void Fail(const std::string& message) const {
    check_.FailValue(Text(source_, " is no file of tuning: ", where_, " ", message,
                          "; make it again with `tvm-flashinfer tune`"));
  }

 private:
  const Checker& check_;
  const std::string& source_;
  std::string where_;
  json::Object object_;
};

/*! \brief One entry: the class, as the largest shape of it, and what is fastest there. */
std::pair<ChoiceShape, Tactic> ReadEntry(const Fields& entry) {
  ChoiceShape shape{};
  shape.slot = entry.OneOf("slot", {PlannedSlot::kDecodePaged, PlannedSlot::kPrefillPaged,
                                    PlannedSlot::kPrefillRagged, PlannedSlot::kMLA});
  shape.num_qo_heads = entry.Integer("num_qo_heads", 1, kMaxHeads);
  shape.num_kv_heads = entry.Integer("num_kv_heads", 1, shape.num_qo_heads);
  shape.head_dim_qk = entry.Integer("head_dim_qk", 1, kMaxHeadDim);
  shape.head_dim_vo = entry.Integer("head_dim_vo", 1, kMaxHeadDim);
  shape.causal = entry.Flag("causal");
  shape.window_left = -1;
  shape.batch_size = entry.PowerOfTwo("batch");
  shape.num_rows = shape.batch_size * entry.PowerOfTwo("rows");
  shape.num_keys = shape.batch_size * entry.PowerOfTwo("keys");
  if (shape.num_qo_heads % shape.num_kv_heads != 0) {
    entry.Fail("has a `num_qo_heads` that is no multiple of `num_kv_heads`");
  }
  Tactic tactic{entry.OneOf("kernel", {Kernel::kCudaCore, Kernel::kFA2, Kernel::kFA3,
                                       Kernel::kFA3Copy, Kernel::kSM90, Kernel::kBatchAttention}),
                static_cast<int32_t>(entry.Integer("split_keys", 0, kMaxSize))};
  if (!Serves(tactic.kernel, shape.slot)) {
    entry.Fail(Text("has the kernel ", NameOf(tactic.kernel), ", which ", NameOf(shape.slot),
                    " does not have"));
  }
  constexpr int64_t kGroups[] = {1, 2, 3, 4, 6, 8, 16};  // of the units
  if (tactic.kernel == Kernel::kCudaCore &&
      std::find(std::begin(kGroups), std::end(kGroups), shape.group()) == std::end(kGroups)) {
    entry.Fail(Text("has the kernel cuda_core for ", shape.group(),
                    " query heads per KV head; it has 1, 2, 3, 4, 6, 8 and 16"));
  }
  if (tactic.split_keys != 0 && tactic.kernel != Kernel::kFA2) {
    entry.Fail(Text("has `split_keys` for ", NameOf(tactic.kernel), "; only fa2 takes them"));
  }
  return {shape, tactic};
}

}  // namespace

TuningFile::TuningFile(const Checker& check, std::string text, std::string source)
    : text_(std::move(text)), source_(std::move(source)), digest_(DigestOf(text_)) {
  const auto fail = [&](const std::string& message) {
    check.FailValue(Text(source_, " is no file of tuning: ", message,
                         "; make it again with `tvm-flashinfer tune`"));
  };
  // The parser recurses, so that deep nesting would overflow the stack.
  if (text_.size() > kMaxBytes || DepthOf(text_) > kMaxDepth) {
    fail(Text("it has ", text_.size(), " bytes, nested ", DepthOf(text_), " deep, of at most ",
              kMaxBytes, " and ", kMaxDepth));
  }
  String error;
  const json::Value value = json::Parse(text_, &error);
  if (error.size() != 0) fail("it is no JSON");
  const Fields file(check, source_, "it", value, {"format", "gpu", "versions", "entries"});
  if (file.TextOf("format") != kFormat) {
    file.Fail(Text("has the format \"", file.TextOf("format"), "\", expected \"", kFormat, "\""));
  }
  const Fields gpu(check, source_, "`gpu`", file.Value("gpu"), {"name", "arch", "num_sm"});
  const int64_t arch = gpu.Integer("arch", 10, 999);
  gpu_ = {gpu.TextOf("name"), static_cast<int>(arch / 10), static_cast<int>(arch % 10),
          static_cast<int>(gpu.Integer("num_sm", 1, INT32_MAX))};
  const Fields versions(check, source_, "`versions`", file.Value("versions"),
                        {"tvm_flashinfer", "flashinfer", "cuda_driver"});
  version_ = versions.TextOf("tvm_flashinfer");
  flashinfer_ = versions.TextOf("flashinfer");
  cuda_ = versions.Integer("cuda_driver", 0, INT32_MAX);
  int64_t index = 0;
  for (const Any& item : file.List("entries")) {
    const Fields entry(check, source_, Text("entry ", index++), item,
                       {"slot", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo",
                        "causal", "batch", "rows", "keys", "kernel", "split_keys", "microseconds"});
    const auto [shape, tactic] = ReadEntry(entry);
    const std::optional<uint64_t> key = KeyOf(shape);
    if (!key.has_value()) entry.Fail("has sizes that are too large");
    if (!tactics_.insert({*key, tactic}).second) {
      entry.Fail("is for the class of an earlier one");
    }
  }
}

const Tactic* TuningFile::Find(const ChoiceShape& shape) const {
  const std::optional<uint64_t> key = KeyOf(shape);
  if (!key.has_value()) return nullptr;
  auto it = tactics_.find(*key);
  return it == tactics_.end() ? nullptr : &it->second;
}

std::string TuningFile::WhyOld() const {
  if (version_ != kVersion) {
    return Text("it was made with tvm_flashinfer ", version_, ", this is ", kVersion);
  }
  if (flashinfer_ != kFlashInferVersion) {
    return Text("it was made with the kernels of FlashInfer ", flashinfer_, ", these are of ",
                kFlashInferVersion);
  }
  return "";
}

std::string TuningFile::WhyStale() const {
  const std::string old = WhyOld();
  if (!old.empty()) return old;
  const int here = DriverCudaMajor();
  if (here != 0 && cuda_ != here) {
    return Text("it was made with a driver for CUDA ", cuda_, ", the one here is for CUDA ", here);
  }
  return "";
}

std::string TuningFile::WhyForeign(const Gpu& gpu) const {
  if (gpu == gpu_) return "";
  return Text("it was made on ", gpu_.ToText(), ", and this GPU is ", gpu.ToText());
}

}  // namespace ops
}  // namespace tvm_flashinfer
