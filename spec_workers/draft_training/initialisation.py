"""Where a draft's training begins: at what of the target can serve.

Legend: E hidden, D draft vocabulary.
"""

from __future__ import annotations

import torch

from rollout.models.causal_lm import CausalLM
from spec_workers.draft_training.decoder_layer import DecoderLayer
from spec_workers.draft_training.eagle3 import Eagle3
from spec_workers.draft_training.mtp import MtpChain
from spec_workers.draft_training.target_tensors import TargetTensors
