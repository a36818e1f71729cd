"""Every setting of a training run, as frozen dataclasses with the range of each; the
phases that follow from them, and the settings as JSON."""

from sparsejax.config.data import DataConfig as DataConfig
from sparsejax.config.mesh import MeshConfig as MeshConfig
from sparsejax.config.model import ModelConfig as ModelConfig
from sparsejax.config.optimizer import OptimizerConfig as OptimizerConfig
from sparsejax.config.optimizer import OptimizerName as OptimizerName
from sparsejax.config.optimizer import ScheduleName as ScheduleName
from sparsejax.config.phases import RECIPES as RECIPES
from sparsejax.config.phases import STATIC_WEIGHTS as STATIC_WEIGHTS
from sparsejax.config.phases import Interleaved as Interleaved
from sparsejax.config.phases import PhaseConfig as PhaseConfig
from sparsejax.config.phases import RecipeConfig as RecipeConfig
from sparsejax.config.phases import RecipeName as RecipeName
from sparsejax.config.train import PresetName as PresetName
from sparsejax.config.train import TrainConfig as TrainConfig
