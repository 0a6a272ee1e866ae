"""
The engine's ops on CPU tensors, by address. See rollout.ops for what they compute.
"""

from collections.abc import Sequence

FLOAT32: int = 0

BFLOAT16: int = 1

FLOAT16: int = 2

def instruction_set() -> str:
    """Which kernels run: avx512, avx2 or generic."""

def set_gomp_parallel(address: int) -> None:
    """Hand over GOMP_parallel of the OpenMP runtime to run on; 0 is serial."""

def rms_norm(
    dtype: int,
    x: int,
    shape: Sequence[int],
    strides: Sequence[int],
    weight: int,
    weight_len: int,
    eps: float,
    unit_offset: bool,
    out: int,
    threads: int,
) -> None: ...
def add_rms_norm(
    dtype: int,
    x: int,
    shape: Sequence[int],
    strides: Sequence[int],
    residual: int,
    residual_shape: Sequence[int],
    residual_strides: Sequence[int],
    weight: int,
    weight_len: int,
    eps: float,
    unit_offset: bool,
    out: int,
    threads: int,
) -> None: ...
def rotary(
    dtype: int,
    q: int,
    q_shape: Sequence[int],
    q_strides: Sequence[int],
    k: int,
    k_shape: Sequence[int],
    k_strides: Sequence[int],
    positions: int,
    positions_len: int,
    wide_positions: bool,
    cos_sin: int,
    cos_sin_shape: Sequence[int],
    threads: int,
) -> None: ...
def store_kv(
    dtype: int,
    shape: Sequence[int],
    k: int,
    k_strides: Sequence[int],
    v: int,
    v_shape: Sequence[int],
    v_strides: Sequence[int],
    pool_shape: Sequence[int],
    k_pool: int,
    k_pool_strides: Sequence[int],
    v_pool: int,
    v_pool_shape: Sequence[int],
    v_pool_strides: Sequence[int],
    slots: int,
    slots_len: int,
    wide_slots: bool,
    threads: int,
) -> None: ...
def gated_mul(
    dtype: int,
    activation: int,
    alpha: float,
    limit: float,
    gate_up: int,
    shape: Sequence[int],
    strides: Sequence[int],
    out: int,
    threads: int,
) -> None: ...
def soft_cap(
    dtype: int, x: int, shape: Sequence[int], strides: Sequence[int], cap: float, threads: int
) -> None: ...

class AttentionSchedule:
    """An AttentionPlan checked and cut into tiles; it borrows the arrays."""

    def __init__(
        self,
        req_to_token: int,
        table_shape: Sequence[int],
        table_row_stride: int,
        entries: int,
        nodes: int,
        rows: int,
        q_offsets: int,
        starts: int,
        run_lens: int,
        node_offsets: int,
        node_masks: int,
        node_slots: int,
        q_shape: Sequence[int],
        pool_shape: Sequence[int],
    ) -> None: ...
    def fits(self, q_shape: Sequence[int], pool_shape: Sequence[int]) -> bool: ...

def paged_attention(
    schedule: AttentionSchedule,
    dtype: int,
    q: int,
    q_shape: Sequence[int],
    q_strides: Sequence[int],
    pool_shape: Sequence[int],
    k_pool: int,
    k_strides: Sequence[int],
    v_pool: int,
    v_shape: Sequence[int],
    v_strides: Sequence[int],
    scale: float,
    window: int,
    soft_cap: float,
    sinks: int,
    sinks_len: int,
    out: int,
    threads: int,
) -> None: ...
def head_matmul(
    dtype: int,
    x: int,
    shape: Sequence[int],
    strides: Sequence[int],
    weights: int,
    weights_shape: Sequence[int],
    out: int,
    out_shape: Sequence[int],
    out_strides: Sequence[int],
    threads: int,
) -> None: ...
def categorical(
    dtype: int,
    logits: int,
    shape: Sequence[int],
    strides: Sequence[int],
    temperature: int,
    temperatures: int,
    uniform: int,
    uniforms: int,
    threshold: int,
    thresholds: int,
    tokens: int,
    logprobs: int,
    threads: int,
) -> None: ...
def token_logprobs(
    dtype: int,
    logits: int,
    shape: Sequence[int],
    strides: Sequence[int],
    temperature: int,
    temperatures: int,
    tokens: int,
    tokens_shape: Sequence[int],
    logprobs: int,
    threads: int,
) -> None: ...
def entropy(
    dtype: int,
    logits: int,
    shape: Sequence[int],
    strides: Sequence[int],
    temperature: int,
    temperatures: int,
    out: int,
    threads: int,
) -> None: ...
def uniforms(
    seeds: int,
    seeds_len: int,
    positions: int,
    positions_len: int,
    out: int,
) -> None: ...
def write_panels(
    dtype: int,
    panels: int,
    panels_shape: Sequence[int],
    rows: int,
    shape: Sequence[int],
    strides: Sequence[int],
    first_row: int,
    threads: int,
) -> None: ...
def read_panels(
    dtype: int,
    panels: int,
    panels_shape: Sequence[int],
    rows: int,
    shape: Sequence[int],
    strides: Sequence[int],
    first_row: int,
    threads: int,
) -> None: ...
def has_panel_matmul() -> bool:
    """Whether this processor has the product of a few rows with a packed weight."""

def panel_matmul(
    x: int,
    x_shape: Sequence[int],
    x_strides: Sequence[int],
    panels: int,
    panels_shape: Sequence[int],
    outputs: int,
    bias: int,
    out: int,
    block: int,
    threads: int,
) -> None: ...
def has_tile_matmul() -> bool:
    """Whether this processor has tiles, and the instruction set in use includes them."""

def tile_matmul(
    x: int,
    x_shape: Sequence[int],
    x_strides: Sequence[int],
    panels: int,
    panels_shape: Sequence[int],
    outputs: int,
    bias: int,
    out: int,
    threads: int,
) -> None: ...
def gated_rms_norm(
    dtype: int,
    x: int,
    shape: Sequence[int],
    strides: Sequence[int],
    gate: int,
    gate_shape: Sequence[int],
    gate_strides: Sequence[int],
    weight: int,
    weight_len: int,
    eps: float,
    out: int,
    threads: int,
) -> None: ...
def sigmoid_gate(
    dtype: int,
    x: int,
    shape: Sequence[int],
    strides: Sequence[int],
    gate: int,
    gate_shape: Sequence[int],
    gate_strides: Sequence[int],
    threads: int,
) -> None: ...
def delta_gates(
    dtype: int,
    a: int,
    shape: Sequence[int],
    strides: Sequence[int],
    b: int,
    b_shape: Sequence[int],
    b_strides: Sequence[int],
    A_log: int,
    A_log_len: int,
    dt_bias: int,
    dt_bias_len: int,
    log_decay: int,
    beta: int,
    threads: int,
) -> None: ...
def causal_conv(
    dtype: int,
    x: int,
    shape: Sequence[int],
    strides: Sequence[int],
    weight: int,
    weight_shape: Sequence[int],
    bias: int,
    bias_len: int,
    states: int,
    states_shape: Sequence[int],
    slot_stride: int,
    entries: int,
    q_offsets: int,
    sources: int,
    parents: int,
    num_parents: int,
    targets: int,
    num_targets: int,
    out: int,
    threads: int,
) -> None: ...
def gated_delta_rule(
    dtype: int,
    q: int,
    q_shape: Sequence[int],
    q_strides: Sequence[int],
    k: int,
    k_shape: Sequence[int],
    k_strides: Sequence[int],
    v: int,
    v_shape: Sequence[int],
    v_strides: Sequence[int],
    log_decay: int,
    log_decay_shape: Sequence[int],
    log_decay_strides: Sequence[int],
    beta: int,
    beta_shape: Sequence[int],
    beta_strides: Sequence[int],
    states: int,
    states_shape: Sequence[int],
    slot_stride: int,
    entries: int,
    q_offsets: int,
    sources: int,
    parents: int,
    num_parents: int,
    targets: int,
    num_targets: int,
    out: int,
    threads: int,
) -> None: ...
def guesses(
    dtype: int,
    logits: int,
    shape: Sequence[int],
    strides: Sequence[int],
    trees: int,
    levels: int,
    level: int,
    temperature: int,
    near: int,
    uniforms: int,
    levels_per_tree: int,
    ratios: int,
    token_ids: int,
    candidates: int,
    children: int,
    near_share: float,
    tokens: int,
    probs: int,
    threads: int,
) -> None: ...
def add_children(
    sizes: Sequence[int],
    arrays: Sequence[int],
    level: int,
    tokens: int,
    shape: Sequence[int],
    token_strides: Sequence[int],
    probs: int,
    prob_strides: Sequence[int],
) -> None: ...
def expand_trees(sizes: Sequence[int], arrays: Sequence[int], level: int) -> None: ...
def choose_nodes(
    width: int,
    candidates: Sequence[int],
    tokens: int,
    token_stride: int,
    probs: int,
    prob_stride: int,
    node_candidates: int,
    node_stride: int,
    sizes: int,
    offsets: int,
    chosen_tokens: int,
    parents: int,
    depths: int,
    masks: int,
    chosen_probs: int,
) -> None: ...

class Recording:
    """
    Calls of ops, kept in order so that they can be made again. The caller keeps the arrays that
    they read and write.
    """

    def __init__(self) -> None: ...
    def start(self) -> None:
        """Record what this thread calls from now on."""

    def stop(self) -> None:
        """Record no more."""

    def __len__(self) -> int: ...
    def replay(self, first: int, last: int) -> None:
        """Make calls [first, last) again, on whatever their arrays hold now."""
