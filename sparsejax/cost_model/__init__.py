"""The cost of a run before it runs: parameters, FLOPs, memory, what devices send each
other, the time of a step, expected speed-up.

Pure arithmetic over settings; nothing is allocated or compiled.
"""

from sparsejax.cost_model.communication import CommunicationBytes as CommunicationBytes
from sparsejax.cost_model.communication import (
    communication_bytes as communication_bytes,
)
from sparsejax.cost_model.communication import exchanges as exchanges
from sparsejax.cost_model.gathered import GatheredBytes as GatheredBytes
from sparsejax.cost_model.gathered import gathered_bytes as gathered_bytes
from sparsejax.cost_model.hardware import CALIBRATED_ON as CALIBRATED_ON
from sparsejax.cost_model.hardware import Links as Links
from sparsejax.cost_model.hardware import Speeds as Speeds
from sparsejax.cost_model.memory import JAX_SHARE as JAX_SHARE
from sparsejax.cost_model.memory import MemoryBytes as MemoryBytes
from sparsejax.cost_model.memory import memory_bytes as memory_bytes
from sparsejax.cost_model.parameters import ParameterCount as ParameterCount
from sparsejax.cost_model.parameters import parameter_count as parameter_count
from sparsejax.cost_model.speed import BREAK_EVEN_SPEEDS as BREAK_EVEN_SPEEDS
from sparsejax.cost_model.speed import GEMM_NUMBERS as GEMM_NUMBERS
from sparsejax.cost_model.speed import LOWER_CLOCK as LOWER_CLOCK
from sparsejax.cost_model.speed import FlopsPerToken as FlopsPerToken
from sparsejax.cost_model.speed import KernelFactors as KernelFactors
from sparsejax.cost_model.speed import flops_per_token as flops_per_token
from sparsejax.cost_model.speed import gemm_speedups as gemm_speedups
from sparsejax.cost_model.speed import predicted_speedup as predicted_speedup
from sparsejax.cost_model.speed import relative_flops as relative_flops
from sparsejax.cost_model.speed import whole_run_speedup as whole_run_speedup
from sparsejax.cost_model.step_time import PredictedStep as PredictedStep
from sparsejax.cost_model.step_time import predicted_step as predicted_step
