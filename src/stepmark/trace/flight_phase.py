"""Which part of a training step issued an operation, where thread or frames prove it."""

# Autograd's own threads run nothing but backward passes.
_BACKWARD_THREAD = "pt_autograd"
# Functions of torch that run in one pass only. Checkpointing runs forward hooks again in the
# backward pass, so a backward frame anywhere outweighs.
_BACKWARD = frozenset(
    (
        *("pre_backward", "_pre_backward", "post_backward", "_backward_prefetch"),
        *("_root_post_backward_final_callback", "_pre_backward_hook", "_post_backward_hook"),
        *("_engine_run_backward", "backward", "recompute_fn", "unpack_hook"),
    )
)
_FORWARD = frozenset(
    ("pre_forward", "_pre_forward", "post_forward", "_post_forward", "forward")
)
_OPTIMIZER_FILE = "torch/optim/"


def phase_of(thread_name: object, frames: object) -> str:
    """ "forward", "backward", "optimizer", or "" where nothing proves it."""
    if str(thread_name or "").startswith(_BACKWARD_THREAD):
        return "backward"
    if not isinstance(frames, list | tuple):
        return ""
    known = [frame for frame in frames[:1000] if isinstance(frame, dict)]
    names = {str(frame.get("name")) for frame in known}
    if names & _BACKWARD:
        return "backward"
    if any(_OPTIMIZER_FILE in str(frame.get("filename")) for frame in known):
        return "optimizer"
    return "forward" if names & _FORWARD else ""
