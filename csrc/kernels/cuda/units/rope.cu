// Rotary embedding of heads that lie anywhere, on their way into pages too, of every dtype.
#include "../rotary_move.cuh"
#include "../token_slots.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

TVM_FLASHINFER_REGISTER(move_rotated, "move_rotated", &MoveRotated);
TVM_FLASHINFER_REGISTER(find_token_slots, "find_token_slots", &FindTokenSlots);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer
