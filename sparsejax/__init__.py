"""Pre-train language models faster on sparse tensor cores."""

from sparsejax.estimators import mvue as mvue
from sparsejax.estimators import straight_through as straight_through
from sparsejax.formats import Compressed as Compressed
from sparsejax.formats import compress as compress
from sparsejax.formats import decompress as decompress
from sparsejax.layers import Attention as Attention
from sparsejax.layers import RMSNorm as RMSNorm
from sparsejax.layers import SparseFFN as SparseFFN
from sparsejax.micro_batches import loss_and_gradient as loss_and_gradient
from sparsejax.model import Transformer as Transformer
from sparsejax.model import cross_entropy as cross_entropy
from sparsejax.ops.backend import Decision as Decision
from sparsejax.ops.ffn import ffn as ffn
from sparsejax.ops.ffn_choice import SlowerThanDense as SlowerThanDense
from sparsejax.ops.ffn_choice import why_slower_than_dense as why_slower_than_dense
from sparsejax.ops.ffn_spec import FFNSparsity as FFNSparsity
from sparsejax.ops.ffn_spec import FFNSpec as FFNSpec
from sparsejax.ops.gated_ffn import GatedFFNSpec as GatedFFNSpec
from sparsejax.ops.gated_ffn import gated_ffn as gated_ffn
from sparsejax.ops.grouped_matmul import grouped_matmul as grouped_matmul
from sparsejax.ops.sparse_matmul import sparse_matmul as sparse_matmul
from sparsejax.packing import Packed as Packed
from sparsejax.packing import pack as pack
from sparsejax.packing import unpack as unpack
from sparsejax.patterns import NM as NM
from sparsejax.patterns import VNM as VNM
from sparsejax.recipe import Phase as Phase
from sparsejax.switching import set_sparsity as set_sparsity
from sparsejax.switching import switch as switch

__version__ = "0.1.0"
