#include "kernel_table.h"

#include <dlfcn.h>

#include <mutex>
#include <set>
#include <sstream>

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

namespace {

// Zero-initialised before any static initialiser runs, so units may register in any order.
KernelEntry* g_entries = nullptr;

struct LoadedLibraries {
  std::mutex mutex;
  std::set<void*> handles;
};

LoadedLibraries* Loaded() {
  static LoadedLibraries* loaded = new LoadedLibraries();
  return loaded;
}

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "f32";
    case DType::kFloat16:
      return "f16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat8E4M3:
      return "e4m3";
    case DType::kFloat8E5M2:
      return "e5m2";
  }
  return "unknown";
}

}  // namespace

const KernelEntry* Entries() { return g_entries; }

void Register(KernelEntry* entry) {
  entry->next = g_entries;
  g_entries = entry;
}

std::string LoadLibrary(const std::string& path) {
  LoadedLibraries* loaded = Loaded();
  std::lock_guard<std::mutex> lock(loaded->mutex);
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return why == nullptr ? "dlopen failed" : why;
  }
  // dlopen gives the same handle for the same file: its entries are in the table already.
  if (!loaded->handles.insert(handle).second) {
    dlclose(handle);
    return "";
  }
  using EntriesFn = const KernelEntry* (*)();
  auto entries = reinterpret_cast<EntriesFn>(dlsym(handle, "tvm_flashinfer_kernel_entries"));
  if (entries == nullptr) {
    loaded->handles.erase(handle);
    dlclose(handle);
    return path +
           " has no symbol tvm_flashinfer_kernel_entries: it is not a library of kernel units";
  }
  // The entries are linked anew, since their `next` belongs to the other library's own list. They
  // are never freed: a library of units stays loaded for the life of the process.
  for (const KernelEntry* entry = entries(); entry != nullptr; entry = entry->next) {
    Register(new KernelEntry{entry->name, entry->function, entry->archs, nullptr});
  }
  return "";
}

bool ArchRunsOn(const std::string& arch, int major, int minor) {
  const bool exact = !arch.empty() && (arch.back() == 'a' || arch.back() == 'f');
  const int number = std::stoi(exact ? arch.substr(0, arch.size() - 1) : arch);
  // Machine code runs on its own major version, from its minor version on; "a" code on one only.
  return exact ? number == major * 10 + minor : number / 10 == major && number % 10 <= minor;
}

void* Find(const std::string& name, int major, int minor) {
  for (const KernelEntry* entry = g_entries; entry != nullptr; entry = entry->next) {
    if (name != entry->name) continue;
    std::istringstream archs(entry->archs);
    for (std::string arch; std::getline(archs, arch, ',');) {
      if (ArchRunsOn(arch, major, minor)) return entry->function;
    }
  }
  return nullptr;
}

PlanCursor* SharedPlanCursor() {
  static PlanCursor cursor;
  return &cursor;
}

std::string KernelName(const char* op, DType dtype, DType kv_dtype, int head_dim_qk,
                       int head_dim_vo) {
  std::ostringstream name;
  name << op << ":" << DTypeName(dtype);
  if (kv_dtype != dtype) name << ":" << DTypeName(kv_dtype);
  name << ":d" << head_dim_qk;
  if (head_dim_vo != head_dim_qk) name << "x" << head_dim_vo;
  return name.str();
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer
