"""What a run prints besides its plan: the table of models, the report at the end."""
import resource

import torch

from model.config import PRESETS
from model.layout import num_params
from runtime.plan import STATE_BYTES
from runtime.stalls import StepTimes


def model_table() -> str:
    """The presets: parameters, bytes of state, bytes a token of a layer's boundary in bf16, for all layers."""
    lines = [f"{'model':<14}{'parameters':>12}{'state':>12}{'a token':>12}   layers x hidden, heads/kv heads x width, ffn, vocabulary"]
    for c in PRESETS.values():
        params = num_params(c)
        boundaries_mb = 2 * c.hidden * (c.layers + 1) / 1e6
        lines.append(f"{c.name:<14}{params / 1e9:>10.3f} B{params * STATE_BYTES / 1e9:>9.2f} GB{boundaries_mb:>9.3f} MB"
                     f"   {c.layers} x {c.hidden}, {c.heads}/{c.kv_heads} x {c.head_dim}, {c.ffn}, {c.vocab}"
                     f"{', tied' if c.tied else ''}{', qkv bias' if c.qkv_bias else ''}{', q/k norm' if c.qk_norm else ''}")
    lines.append(f"state: masters and moments, {STATE_BYTES} B a parameter, in host memory; a token: its boundary activations in bf16")
    return "\n".join(lines)


def memory_metrics() -> dict[str, float]:
    """Most memory so far, GiB, for metrics.jsonl: mem/*."""
    row = {"mem/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20}
    if torch.cuda.is_available():
        row["mem/hbm_peak_gib"] = torch.cuda.max_memory_allocated() / 2 ** 30
    return row


def stall_line(times: StepTimes) -> str:
    """One line on where a step's time went."""
    causes = ", ".join(f"{cause} {seconds * 1e3:.0f} ms" for cause, seconds in times.exposed.items() if seconds > 5e-4)
    return (f"step {times.step_s:.3f} s: compute busy {times.busy['compute']:.3f} s, update {times.busy['update']:.3f} s, "
            f"waited for {causes or 'nothing'}")
