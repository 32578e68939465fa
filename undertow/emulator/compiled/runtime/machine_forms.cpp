// All machine forms by the name under which encode_machine.py asks for them.
#include "machine.hpp"

namespace undertow {

#define UNDERTOW_FORMS(FORM)                                                                                  \
    FORM(load) FORM(store) FORM(atomic) FORM(shfl) FORM(elect) FORM(vote) FORM(vote_ballot) FORM(match)       \
    FORM(redux) FORM(redux_float) FORM(activemask) FORM(bar_warp_sync) FORM(pack) FORM(unpack)                \
    FORM(resize) FORM(not_predicate) FORM(clock) FORM(mbarrier_init) FORM(mbarrier_inval)                     \
    FORM(mbarrier_tx) FORM(mbarrier_arrive) FORM(mbarrier_wait) FORM(pending_count) FORM(barrier_sync)        \
    FORM(barrier_arrive) FORM(cluster_arrive) FORM(cluster_wait) FORM(nothing) FORM(zero)                     \
    FORM(setmaxnreg) FORM(bulk_load) FORM(bulk_to_global) FORM(cp_async) FORM(commit_group)                   \
    FORM(wait_group) FORM(cp_async_arrive) FORM(st_bulk) FORM(tensor_load) FORM(tensor_store) FORM(mma)       \
    FORM(commit) FORM(tmem_alloc) FORM(tmem_dealloc) FORM(tmem_relinquish) FORM(tmem_load)                    \
    FORM(tmem_store) FORM(tmem_wait) FORM(ldmatrix) FORM(stmatrix) FORM(wgmma) FORM(wgmma_fence)              \
    FORM(wgmma_commit) FORM(wgmma_wait) FORM(mapa) FORM(getctarank) FORM(remote_store) FORM(movmatrix)

#define UNDERTOW_DECLARE(name) Step op_##name(Context& c);
UNDERTOW_FORMS(UNDERTOW_DECLARE)
#undef UNDERTOW_DECLARE

#define UNDERTOW_ENTRY(name) {#name, op_##name},
const MachineForm machine_forms[] = {UNDERTOW_FORMS(UNDERTOW_ENTRY)};
#undef UNDERTOW_ENTRY

const int num_machine_forms = int(sizeof(machine_forms) / sizeof(machine_forms[0]));

}  // namespace undertow
