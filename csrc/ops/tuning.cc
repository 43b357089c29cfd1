#include "tuning.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>

#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace tuning_detail {
const Tuning kUnread;
std::atomic<const Tuning*> current{&kUnread};
}  // namespace tuning_detail

namespace {

using tuning_detail::current;
using tuning_detail::kUnread;

constexpr const char* kVariable = "TVM_FLASHINFER_TUNING";
constexpr const char* kOfModel = "the tuning of the model";

std::mutex& Writing() {
  static std::mutex* mutex = new std::mutex();
  return *mutex;
}

/*! \brief Put a state into use. Earlier ones are kept: a thread may be reading them. */
void Install(std::unique_ptr<const Tuning> tuning) {
  static auto* kept = new std::vector<std::unique_ptr<const Tuning>>();
  current.store(tuning.get(), std::memory_order_release);
  kept->push_back(std::move(tuning));
}

/*! \brief A file that the user named must be for this machine: to drop it would be silent. */
std::unique_ptr<const Tuning> ByUser(const Checker& check, std::string text, std::string source) {
  auto file = std::make_shared<const TuningFile>(check, std::move(text), std::move(source));
  std::string why = file->WhyStale();
  bool fits = Gpus().empty();  // where there is no GPU, only questions are asked of it
  for (const Gpu& gpu : Gpus()) fits = fits || file->WhyForeign(gpu).empty();
  if (why.empty() && !fits) why = file->WhyForeign(Gpus().front());
  if (!why.empty()) {
    check.FailValue(Text(file->source(), " is not for this machine: ", why,
                         "; run `tvm-flashinfer tune` here, or leave the file out"));
  }
  auto tuning = std::make_unique<Tuning>();
  tuning->by_user = true;
  tuning->files.push_back(std::move(file));
  return tuning;
}

}  // namespace

namespace tuning_detail {

const Tuning* ReadEnvironment(const Checker& check) {
  std::lock_guard<std::mutex> lock(Writing());
  const Tuning* known = current.load(std::memory_order_acquire);
  if (known != &kUnread) return known;
  const char* path = std::getenv(kVariable);
  if (path == nullptr || path[0] == 0) {
    current.store(nullptr, std::memory_order_release);
    return nullptr;
  }
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || !text) {
    check.FailValue(Text(kVariable, " is \"", path,
                         "\", which cannot be read or is empty; give the path of a ",
                         "file that `tvm-flashinfer tune` wrote, or leave the variable unset"));
  }
  Install(ByUser(check, text.str(), path));
  return current.load(std::memory_order_acquire);
}

}  // namespace tuning_detail

void Warn(const std::string& message) {
  std::fprintf(stderr, "tvm_flashinfer: %s\n", message.c_str());
}

Tuned Tuning::Find(const Gpu& gpu, const ChoiceShape& shape) const {
  Tuned found;
  for (auto file = files.rbegin(); file != files.rend(); ++file) {
    if (!((*file)->gpu() == gpu)) continue;
    found = {(*file)->Find(shape), file->get()};
    if (found) break;
  }
  return found;
}

Tuned FindTuned(const Tuning* tuning, DLDevice device, const ChoiceShape& shape) {
  const Gpu* gpu = tuning == nullptr ? nullptr : FindGpu(device.device_id);
  if (gpu == nullptr) return {};
  const Tuned found = tuning->Find(*gpu, shape);
  if (found.file != nullptr) return found;
  for (const auto& file : tuning->files) {
    if (!file->FirstMismatch(device.device_id)) continue;
    Warn(
        Text(file->source(), " is not used on ", DeviceText(device), ": ", file->WhyForeign(*gpu)));
  }
  return {};
}

Choice TunedChoice(const Tuned& tuned) {
  return {*tuned.tactic, "tuned",
          Text("the fastest by ", tuned.file->source(), ", ", tuned.file->digest())};
}

Choice DefaultChoice(Kernel kernel, const std::string& reason, const Tuned& tuned) {
  std::string text = reason;
  if (tuned) {
    text += Text("; ", tuned.file->source(), " has ", NameOf(tuned.tactic->kernel),
                 ", which is not loaded or needs more of the workspace");
  } else if (tuned.file != nullptr) {
    text += Text("; ", tuned.file->source(), " has nothing for this shape");
  }
  return {{kernel}, "default", text};
}

void UseModelTuning(const Checker& check, const std::string& text) {
  const Tuning* used = CurrentTuning(check);
  if (used != nullptr && used->by_user) return;
  std::lock_guard<std::mutex> lock(Writing());
  used = current.load(std::memory_order_acquire);
  auto tuning = std::make_unique<Tuning>();
  if (used != nullptr) {
    if (used->by_user) return;
    tuning->files = used->files;
    for (const auto& file : used->files) {
      if (file->text() == text) return;
    }
  }
  auto file = std::make_shared<const TuningFile>(check, text, kOfModel);
  const std::string stale = file->WhyStale();
  if (!stale.empty()) {
    Warn(Text(kOfModel, " is not used: ", stale));
    return;
  }
  tuning->files.push_back(std::move(file));
  Install(std::move(tuning));
}

Map<String, Any> CheckTuning(String text, String source) {
  const Checker check("check_tuning");
  const TuningFile file(check, text, source);
  const std::string old = file.WhyOld();
  if (!old.empty()) {
    check.FailValue(Text(file.source(), " is an old file of tuning: ", old,
                         "; make it again with `tvm-flashinfer tune`"));
  }
  const Gpu& gpu = file.gpu();
  return {{"gpu", String(gpu.ToText())},
          {"arch", static_cast<int64_t>(10 * gpu.major + gpu.minor)},
          {"digest", String(file.digest())},
          {"entries", file.size()}};
}

void LoadTuning(String text, String source) {
  const Checker check("load_tuning");
  auto tuning = ByUser(check, text, source);
  std::lock_guard<std::mutex> lock(Writing());
  Install(std::move(tuning));
}

void ClearTuning() {
  std::lock_guard<std::mutex> lock(Writing());
  current.store(nullptr, std::memory_order_release);
}

Array<Map<String, Any>> TuningFiles() {
  const Checker check("tuning_files");
  Array<Map<String, Any>> files;
  const Tuning* tuning = CurrentTuning(check);
  if (tuning == nullptr) return files;
  for (const auto& file : tuning->files) {
    files.push_back({{"source", String(file->source())},
                     {"gpu", String(file->gpu().ToText())},
                     {"digest", String(file->digest())},
                     {"entries", file->size()}});
  }
  return files;
}

}  // namespace ops
}  // namespace tvm_flashinfer
