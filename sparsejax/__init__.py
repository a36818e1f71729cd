"""Pre-train language models faster on sparse tensor cores."""

from sparsejax.config import ModelConfig as ModelConfig
from sparsejax.feed_forward.choice import SlowerThanDense as SlowerThanDense
from sparsejax.feed_forward.choice import why_slower_than_dense as why_slower_than_dense
from sparsejax.feed_forward.ffn import ffn as ffn
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec as GatedFFNSpec
from sparsejax.feed_forward.gated_ffn import gated_ffn as gated_ffn
from sparsejax.feed_forward.layout import FFNLayout as FFNLayout
from sparsejax.feed_forward.operands.weights import PackedFFN as PackedFFN
from sparsejax.feed_forward.operands.weights import pack_ffn as pack_ffn
from sparsejax.feed_forward.spec import FFNSparsity as FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec as FFNSpec
from sparsejax.models.attention import Attention as Attention
from sparsejax.models.generation import generate as generate
from sparsejax.models.norm import RMSNorm as RMSNorm
from sparsejax.models.sparse_ffn import SparseFFN as SparseFFN
from sparsejax.models.transformer import Transformer as Transformer
from sparsejax.models.transformer import cross_entropy as cross_entropy
from sparsejax.models.transformer import greedy_sample as greedy_sample
from sparsejax.ops.backend import Decision as Decision
from sparsejax.ops.grouped_matmul import grouped_matmul as grouped_matmul
from sparsejax.ops.sparse_matmul import sparse_matmul as sparse_matmul
from sparsejax.routing.routers import ActivationEnergy as ActivationEnergy
from sparsejax.routing.routers import NearestCentre as NearestCentre
from sparsejax.routing.routers import Router as Router
from sparsejax.routing.routers import SameExperts as SameExperts
from sparsejax.routing.routers import TokenHash as TokenHash
from sparsejax.sparsity.compressed import Compressed as Compressed
from sparsejax.sparsity.compressed import compress as compress
from sparsejax.sparsity.compressed import decompress as decompress
from sparsejax.sparsity.estimators import mvue as mvue
from sparsejax.sparsity.estimators import straight_through as straight_through
from sparsejax.sparsity.masks import soft_threshold_scale as soft_threshold_scale
from sparsejax.sparsity.packed import Packed as Packed
from sparsejax.sparsity.packed import pack as pack
from sparsejax.sparsity.packed import unpack as unpack
from sparsejax.sparsity.patterns import NM as NM
from sparsejax.sparsity.patterns import VNM as VNM
from sparsejax.sparsity.patterns import BlockDiagonal as BlockDiagonal
from sparsejax.training.micro_batches import loss_and_gradient as loss_and_gradient
from sparsejax.training.recipe import Phase as Phase
from sparsejax.training.switching import set_sparsity as set_sparsity
from sparsejax.training.switching import switch as switch

__version__ = "0.1.0"
