"""The example's model without a plan for tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

from examples import parallel_block

SPEC = replace(parallel_block.SPEC, tensor_plan={})
