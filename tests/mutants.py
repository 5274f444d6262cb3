"""Mutants: small faults put into the library one at a time, each of which some test must notice.

    python -m tests.mutants [NAME ...]    those whose name contains one of the words; all of them by default

Every mutant is applied in a copy of its own, never in the checkout, and there the tests that have to notice it run. Before that
they run in a copy as it is, where they have to pass. The exit status is 1 if a mutant survives, or cannot be judged.

Changes that were tried and are no faults, so that no test can notice them:

* `dkdv_kernel` not clearing keys and values of negative ids, `dq_kernel` not clearing values, the forward not clearing keys: NaN
  spoils a row or column of scores, which is replaced by selection. What takes part in a second product is cleared, and listed.
* `_of_cluster` without `members` beside counts: where there is no member no columns are left.
* One operand of `add` alone not cast first: the other's dtype is the result's, to which Triton promotes.
* `forward_kernel` and `dq_kernel` reading queries past q_length: they spoil their own rows alone, which are replaced as a whole.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("jtops", "tests", "conftest.py", "pyproject.toml")
SECONDS = 900  # for one mutant's tests; a mutant that makes them hang was noticed


class Mutant(NamedTuple):
    """`old`, which stands exactly once in `file`, becomes `new`; `tests` are node ids, of which one has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutants(file: str, *changes: tuple) -> list[Mutant]:
    return [Mutant(name, f"jtops/{file}", old, new, tuple(tests)) for name, old, new, *tests in changes]


_RANGES, _HOST = "tests/kernels/test_attention_ranges.py::", "tests/kernels/test_hopper_host.py::"
_KEYS, _QUERIES = _RANGES + "test_keys_that_a_block_of_queries_walks", _RANGES + "test_queries_that_a_block_of_keys_walks"
_CLAMPED, _PADDING = _RANGES + "test_lengths_above_the_size_are_the_size", _RANGES + "test_padding_of_negative_ids_reaches_nothing"
_SUMS, _WALK = "tests/kernels/test_sums_dtype.py::", "tests/kernels/test_product_walk.py::"
_LAST = _WALK + "test_the_last_program_reads_and_writes_the_last_elements"
_STATE, _PLACED = "tests/core/test_launch_state.py::", "tests/core/test_partition.py::"
_SERVED, _TABLES = "tests/test_served.py::", "tests/kernels/test_tuned.py::"
_SCORES = "tests/kernels/test_attention_scores.py::"
_REFUSED = "tests/kernels/test_hopper_forward.py::test_what_it_refuses_has_a_reason"

MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------------------------------------- attention: its masks
    *_mutants(
        "kernels/attention/mask.py",
        (
            "key_range: stop one short",
            "last + shift + mask.right + 1)\n        full",
            "last + shift + mask.right)\n        full",
            _KEYS,
        ),
        (
            "key_range: stop of the first query",
            "stop, last + shift + mask.right + 1)\n        f",
            "stop, first + shift + mask.right + 1)\n        f",
            _KEYS,
        ),
        (
            "key_range: middle too long",
            "full_stop, first + shift + mask.right + 1",
            "full_stop, last + shift + mask.right + 1",
            _KEYS,
        ),
        (
            "key_range: middle one too long",
            "full_stop, first + shift + mask.right + 1",
            "full_stop, first + shift + mask.right + 2",
            _KEYS,
        ),
        ("key_range: middle too early", "full_start, last + shift - mask.left", "full_start, first + shift - mask.left", _KEYS),
        (
            "key_range: start too late",
            "tl.maximum(start, first + shift - mask.left)",
            "tl.maximum(start, last + shift - mask.left)",
            _KEYS,
        ),
        (
            "key_range: middle rounded down",
            "(full_start + BLOCK - 1) // BLOCK * BLOCK, (stop",
            "full_start // BLOCK * BLOCK, (stop",
            _KEYS,
        ),
        ("key_range: middle of dead queries", "if last >= q_length:", "if first >= q_length:", _KEYS),
        (
            "key_range: middle in spite of ids",
            "full_start = start\n        full_stop = start",
            "full_start = start",
            _RANGES + "test_ids_leave_no_middle",
        ),
        (
            "query_range: no offset at the start",
            "tl.maximum(start, first - mask.right - shift - offset)",
            "tl.maximum(start, first - mask.right - shift)",
            _QUERIES,
        ),
        ("query_range: no offset at the stop", "last + mask.left - shift - offset + 1", "last + mask.left - shift + 1", _QUERIES),
        (
            "query_range: no offset of the length",
            "stop = tl.minimum(s, q_length - offset)",
            "stop = tl.minimum(s, q_length)",
            _QUERIES,
        ),
        ("query_range: stop one short", "last + mask.left - shift - offset + 1", "last + mask.left - shift - offset", _QUERIES),
        ("query_range: dead keys", "if first >= kv_length:", "if first > kv_length:", _QUERIES),
        (
            "kv_lengths not clamped",
            "tl.minimum(tl.load(mask.kv_lengths.array + operand_row(mask.kv_lengths, b)).to(tl.int32), kv_length)",
            "tl.load(mask.kv_lengths.array + operand_row(mask.kv_lengths, b)).to(tl.int32)",
            _CLAMPED,
        ),
        (
            "q_lengths not clamped",
            "tl.minimum(tl.load(mask.q_lengths.array + operand_row(mask.q_lengths, b)).to(tl.int32), q_length)",
            "tl.load(mask.q_lengths.array + operand_row(mask.q_lengths, b)).to(tl.int32)",
            _CLAMPED,
        ),
        ("reference: lengths not clamped", "jnp.minimum(given, size)[..., None, None]", "given[..., None, None]", _CLAMPED),
        ("sees: negative ids meet", "seen = seen & (q_ids == kv_ids) & (kv_ids >= 0)", "seen = seen & (q_ids == kv_ids)", _PADDING),
    ),
    # ------------------------------------------------------------------------------------- attention: portable, and the call
    *_mutants(
        "kernels/attention/portable/backward.py",
        (
            "dkdv: queries of negative ids",
            "load_rows(q_head, start_m, offs_m, h * d, offs_d, rows_inside, d, q_ids,",
            "load_rows(q_head, start_m, offs_m, h * d, offs_d, rows_inside, d, None,",
            _PADDING,
        ),
        (
            "dkdv: cotangents of negative ids",
            "            do = load_rows(do_head, start_m, offs_m, h * e, offs_e, rows_inside, e, q_ids,",
            "            do = load_rows(do_head, start_m, offs_m, h * e, offs_e, rows_inside, e, None,",
            _PADDING,
        ),
        (
            "attention: dk of the capped scores",
            "                ds = tl.where(ds == 0.0, 0.0, ds * slope)",
            "                ds = ds",
            _SCORES + "test_random_calls",
        ),
        (
            "attention: a bias of queries without lse's gradient",
            "return dsinks, dlse - dsinks",
            "return dsinks, -dsinks",
            _SCORES + "test_every_shape_of_a_bias_has_its_gradient",
        ),
        (
            "attention: padding's cotangents reach the sinks",
            "jnp.where(sees_none, -dlse, delta)",
            "delta",
            _SCORES + "test_a_sink_and_no_key",
        ),
        (
            "attention: a shared bias's batch elements in another order",
            "b = element // inner * (own * inner) + bias_row * inner + element % inner",
            "b = element * own + bias_row",
            _SCORES + "test_a_bias_that_an_inner_batch_axis_shares",
        ),
        (
            "dkdv: queries past a later shard's length",
            "rows_inside = tl.minimum(s, q_length - offset)\n    k_ptr",
            "rows_inside = tl.minimum(s, q_length)\n    k_ptr",
            _RANGES + "test_queries_past_their_length_in_a_later_shard",
        ),
        ("masked without tails of t", ' or t % tiles["BLOCK_N"] != 0', "", _RANGES + "test_tails_of_either_length_are_masked"),
        ("masked without tails of s", 's % tiles["BLOCK_M"] != 0 or ', "", _RANGES + "test_tails_of_either_length_are_masked"),
    ),
    *_mutants(
        "kernels/attention/portable/forward.py",
        (
            "forward: values of negative ids",
            "offs_e, kv_length, e, kv_ids, PHASE == 1",
            "offs_e, kv_length, e, None, PHASE == 1",
            _PADDING,
        ),
    ),
    *_mutants(
        "kernels/attention/portable/tiles.py",
        (
            "attention: always tf32",
            'dot_precision(launch.options["precision"], launch.target)',
            'dot_precision("tf32", launch.target)',
            _RANGES + "test_products_of_float32_are_as_exact_as_was_asked",
        ),
    ),
    *_mutants(
        "kernels/attention/op.py",
        (
            "attention: precision ignored",
            "return resolved if q.dtype.itemsize >= 4 else",
            "return resolved if q.dtype.itemsize > 4 else",
            _RANGES + "test_products_of_float32_are_as_exact_as_was_asked",
        ),
        (
            "attention: keys split over devices",
            'whole="t d e"',
            'whole="d e"',
            _RANGES + "test_keys_that_devices_share_are_gathered",
        ),
    ),
    # --------------------------------------------------------------------------------------- attention: Hopper's launchers
    *_mutants(
        "kernels/attention/hopper/limits.py",
        ("Hopper: any architecture", "launch.target.arch != 90", "launch.target.arch < 90", _REFUSED),
        (
            "Hopper: heads of 32",
            "32 < d <= widest and 32 < e",
            "32 <= d <= widest and 32 <= e",
            _HOST + "test_what_the_forward_refuses",
        ),
        (
            "Hopper: all queries past 32 bits",
            'x.k.shape[1], launch.options["q_size"])',
            "x.k.shape[1])",
            _HOST + "test_what_the_backward_refuses",
        ),
        ("Hopper: odd value heads", "d % 8 == e % 8 == 0", "d % 8 == 0", _HOST + "test_what_the_forward_refuses"),
        (
            "Hopper: ids of keys",
            "x.q_ids is not None or x.kv_ids is not None",
            "x.q_ids is not None",
            _HOST + "test_what_the_forward_refuses",
        ),
    ),
    *_mutants(
        "kernels/attention/hopper/forward.py",
        (
            "Hopper forward: infinite scale",
            "0 < scale < math.inf",
            "0 < scale <= math.inf",
            _HOST + "test_what_the_forward_refuses",
        ),
        (
            "Hopper cuts: shards",
            "corner = s == q_size and not moved and ",
            "corner = not moved and ",
            "tests/kernels/test_hopper_forward.py::test_which_blocks_the_mask_can_cut",
        ),
        (
            "Hopper cuts: positions that move",
            "s == q_size and not moved and",
            "s == q_size and",
            "tests/kernels/test_hopper_forward.py::test_which_blocks_the_mask_can_cut",
        ),
        (
            "Hopper cuts: lengths",
            "mask.kv_lengths is None and t % block_n == 0",
            "t % block_n == 0",
            _HOST + "test_blocks_without_a_mask_are_seen_in_full",
        ),
        (
            "Hopper cuts: alignment",
            "mask.right + (0 if mask.align is None else t - s)",
            "mask.right + (0 if mask.align is None else s)",
            _HOST + "test_blocks_without_a_mask_are_seen_in_full",
        ),
        ("Hopper forward: short masked calls", "not (masked and s < 2048)", "not masked", _HOST + "test_tiles_of_the_forward"),
        (
            "Hopper forward: tiles without a counter",
            "(mask.left, mask.right, mask.q_lengths, mask.kv_lengths))\n    heads",
            "(mask.left, mask.right, mask.q_lengths))\n    heads",
            _HOST + "test_tiles_are_drawn_where_they_differ",
        ),
        ("Hopper forward: a counter not zeroed", 'zeroed=("counter",),', "", _HOST + "test_tiles_are_drawn_where_they_differ"),
        (
            "Hopper forward: sections too wide",
            "next_power_of_2(heads + 1) // 2)",
            "next_power_of_2(heads + 1))",
            _HOST + "test_heads_whose_keys_fit_the_cache_go_together",
        ),
        (
            "Hopper forward: shards begin at 0",
            "if s == q_size:",
            "if s <= q_size:",
            _HOST + "test_where_a_shard_begins_is_read_only_of_shards",
        ),
        (
            "Hopper forward: too many registers",
            "REGISTERS=240 if warpgroups == 2 else 160",
            "REGISTERS=240",
            _HOST + "test_programs_and_registers_of_the_forward",
        ),
    ),
    *_mutants(
        "kernels/attention/hopper/backward.py",
        (
            "Hopper backward: lengths of keys",
            "x.q_lengths is not None or x.kv_lengths is not None",
            "x.q_lengths is not None",
            "tests/kernels/test_hopper_backward.py::test_unfit",
        ),
        (
            "Hopper backward: sums past 32 bits",
            "lines * head_block(d) * 4 >= 1 << 38",
            "lines * head_block(d) * 4 > 1 << 38",
            _HOST + "test_what_the_backward_refuses",
        ),
        (
            "Hopper backward: lines not filled up",
            "launch.batch * h * cdiv(s, 128) * 128",
            "launch.batch * h * s",
            _HOST + "test_what_the_backward_refuses",
        ),
        (
            "Hopper backward: tiles of another head",
            "launch.config != heuristic(d)",
            "launch.config.blocks.keys() != heuristic(d).blocks.keys()",
            "tests/kernels/test_hopper_backward.py::test_unfit",
        ),
        (
            "Hopper backward: parts in the gradient's dtype",
            "q.dtype if parts == 1 else jnp.float32",
            "q.dtype",
            _HOST + "test_grids_and_memory_of_the_backward",
        ),
        (
            "Hopper backward: no edge",
            "EDGE=t % block_n != 0 and",
            "EDGE=False and",
            _HOST + "test_only_what_no_mask_cuts_needs_an_edge",
        ),
        (
            "Hopper backward: windows past 32 bits",
            "min(mask.left or 0, most)",
            "mask.left or 0",
            _HOST + "test_windows_past_all_keys_stay_in_32_bits",
        ),
        (
            "Hopper backward: no cotangent",
            "do = jnp.zeros_like(out) if do is None else do",
            "do = do",
            _HOST + "test_a_call_without_cotangent_of_the_result",
        ),
        (
            "Hopper backward: turns in any order",
            "if deterministic else None,",
            "if not deterministic else None,",
            _HOST + "test_turns_are_kept_only_for_one_order_of_sums",
        ),
    ),
    # ------------------------------------------------------------------------------------------------------------- products
    *_mutants(
        "kernels/_lib/product/backward.py",
        (
            "matmul: parts of a in its dtype",
            "dtype = a.dtype if getattr(launch.rows, name).own == launch.batch else jnp.float32",
            "dtype = a.dtype",
            _SUMS + "test_shared_operands_of_products_are_rounded_once",
        ),
        (
            "matmul: parts of b in its dtype",
            "b.dtype if alone[name] else jnp.float32",
            "b.dtype",
            _SUMS + "test_shared_operands_of_products_are_rounded_once",
        ),
        (
            "matmul: dbias rounded at each step",
            "        sums += dz\n",
            "        sums = (sums + dz).to(g_ptr.dtype.element_ty).to(tl.float32)\n",
            _SUMS + "test_bias_sums_are_of_what_was_not_rounded",
        ),
        (
            "matmul: dbias of rounded terms",
            "        sums += dz\n",
            "        sums += dz.to(g_ptr.dtype.element_ty).to(tl.float32)\n",
            _SUMS + "test_bias_sums_are_of_what_was_not_rounded",
        ),
        (
            "matmul: narrow cotangents",
            "g if operands == jnp.float16 and g == jnp.float32 else operands",
            "operands",
            _SUMS + "test_cotangents_below_float16_survive",
        ),
    ),
    *_mutants(
        "kernels/_lib/product/portable.py",
        ("matmul: batch of 32 bits", "batch = (line // work.splits).to(tl.int64)", "batch = line // work.splits", _LAST),
        ("matmul: rows of 32 bits", "pid_m.to(tl.int64) * BLOCK_M", "pid_m * BLOCK_M", _LAST),
        ("matmul: results of 32 bits", "tile.line.to(tl.int64) * problem.m", "tile.line * problem.m", _LAST),
        (
            "matmul: splits that do not fill blocks",
            "k_per_split = cdiv(cdiv(k, shape.splits(config, launch.target)), block_k) * block_k",
            "k_per_split = cdiv(k, shape.splits(config, launch.target))",
            _SUMS + "test_parts_of_k_do_not_overlap",
        ),
    ),
    *_mutants(
        "kernels/_lib/product/side.py",
        (
            "matmul: lengths of 32 bits",
            "length = tl.full((), 1, tl.int64) * side.length\n    if",
            "length = side.length\n    if",
            _LAST,
        ),
        (
            "matmul: groups past a shared bias",
            "size = min(neighbours) if",
            "size = max(neighbours) if",
            "tests/kernels/test_product.py::test_groups",
        ),
    ),
    # ------------------------------------------------------------------------------------------------------ norms and add
    *_mutants(
        "kernels/norm/backward.py",
        (
            "norm: rows by the coarser parameter",
            "group_rows = min((own.inner",
            "group_rows = max((own.inner",
            _SUMS + "test_parameters_that_different_rows_share",
        ),
        (
            "norm: fused multiply-add",
            '"enable_fp_fusion": False',
            '"enable_fp_fusion": True',
            _SUMS + "test_backward_of_norms_has_no_fused_multiply_add",
        ),
    ),
    *_mutants(
        "kernels/norm/forward.py",
        (
            "norm: the last member's count",
            "counts = tl.minimum(part_n, n - tl.arange(0, 8) * part_n)",
            "counts = part_n - tl.arange(0, 8) * 0",
            "tests/kernels/test_cluster_merge.py::test_statistics_of_a_row",
        ),
        (
            "norm: squares of members that are not there",
            "tl.where(members(CLUSTER), squares, 0.0)",
            "squares",
            "tests/kernels/test_cluster_merge.py::test_statistics_of_a_row",
        ),
    ),
    *_mutants(
        "kernels/add.py",
        (
            "add: operands in their own dtypes",
            "x_rows, X_M, X_N).to(dtype)\n    y = _load(y_ptr, rows, cols, r, m, n, y_rows, Y_M, Y_N).to(dtype)",
            "x_rows, X_M, X_N)\n    y = _load(y_ptr, rows, cols, r, m, n, y_rows, Y_M, Y_N)",
            _SUMS + "test_operands_are_added_in_the_results_dtype",
        ),
    ),
    # ------------------------------------------------------------------------------------------------------------ the frame
    *_mutants(
        "kernels/_lib/frame/local.py",
        (
            "frame: spread axes in their dtype",
            "jnp.sum(parts, shared, dtype=jnp.promote_types(parts.dtype, jnp.float32))",
            "jnp.sum(parts, shared)",
            _SUMS + "test_axes_that_were_spread_are_summed_in_float32",
        ),
        (
            "frame: axes that are not neighbours",
            "x.shape[:first] + shape[first:last] + x.shape[last:]",
            "x.shape[:first] + x.shape[first:last] + x.shape[last:]",
            "tests/kernels/test_fused_op.py::test_rows_of_shared_operands",
        ),
    ),
    *_mutants(
        "kernels/_lib/frame/launch.py",
        (
            "frame: rows summed in their dtype",
            "return jnp.sum(parts, (0, 2), dtype=jnp.promote_types(gradients.dtype, jnp.float32))",
            "return jnp.sum(parts, (0, 2))",
            _SUMS + "test_rows_are_summed_in_float32",
        ),
        (
            "frame: inner and outer rows",
            "gradients.reshape(-1, self.own, self.inner,",
            "gradients.reshape(self.inner, self.own, -1,",
            _SUMS + "test_parameters_that_different_rows_share",
        ),
    ),
    # ------------------------------------------------------------------------------------------------------- tuned tables
    *_mutants(
        "kernels/_lib/frame/tuned.py",
        (
            "tables: another kernel's entries",
            "if entry.kernels == choice.fingerprint:",
            "if entry.kernels:",
            _TABLES + "test_a_changed_kernel_is_ignored_with_one_warning",
        ),
        ("tables: another architecture's", "if t.target == target]", "if t.target]", _TABLES + "test_order_of_devices"),
        (
            "tables: shipped ones first",
            'f[0] != "user", f[1].device',
            'f[0] == "user", f[1].device',
            _TABLES + "test_order_of_devices",
        ),
        ("tables: other devices first", "f[1].device != device,", "f[1].device == device,", _TABLES + "test_order_of_devices"),
        (
            "tables: another Triton's",
            'if source == "user" and not table.current',
            'if source == "" and not table.current',
            _TABLES + "test_another_triton",
        ),
        (
            "tables: any blocks",
            "if config.blocks.keys() != heuristic.blocks.keys():",
            "if not config.blocks:",
            _TABLES + "test_a_wrong_config_names_its_file",
        ),
    ),
    *_mutants(
        "core/tuning/table.py",
        (
            "tables: a file that changed",
            "is None or known[0] != stamp:",
            "is None:",
            _TABLES + "test_order",
        ),
        (
            "tables: a writer loses another's",
            "kept = {p: e for p, e in kept.items() if p not in dropped} | ",
            "kept = ",
            _TABLES + "test_lookups_and_writes_at_once",
        ),
    ),
    # ------------------------------------------------------------------------------------------------------------- the core
    *_mutants(
        "core/launch/lowering.py",
        (
            "interpreter: a key without grid",
            "call.bound, call.grid, call.aliases",
            "call.bound, call.aliases",
            _STATE + "test_calls_that_differ_in_their_grid",
        ),
        (
            "interpreter: a key without zeroed outputs",
            "call.aliases, call.zeroed, ctx.avals_in",
            "call.aliases, ctx.avals_in",
            _STATE + "test_calls_that_differ_in_what_is_zeroed",
        ),
    ),
    *_mutants(
        "core/launch/ptx.py",
        (
            "PTX: numbers extended by zeros",
            'signed=kind == "s"',
            "signed=False",
            _STATE + "test_numbers_in_registers_wider_than_they_are",
        ),
        (
            "PTX: numbers extended by their sign",
            'signed=kind == "s"',
            "signed=True",
            _STATE + "test_numbers_in_registers_wider_than_they_are",
        ),
    ),
    *_mutants(
        "core/cache.py",
        ("cache: failures are kept", "memory.pop(key, None)", "memory.get(key, None)", _STATE + "test_what_fails_is_tried_again"),
    ),
    # --------------------------------------------------------------------------------------------------------------- meshes
    *_mutants(
        "core/mesh/partition.py",
        (
            "meshes: what must be whole is split",
            "and axis not in axes.whole and",
            "and",
            _PLACED + "test_decisions",
            _PLACED + "test_every_decision_is_legal",
        ),
        (
            "meshes: what does not divide is split",
            " and sizes[axis] % math.prod(mesh_shape[a] for a in over) == 0",
            "",
            _PLACED + "test_decisions",
        ),
        ("meshes: a mesh axis twice", "and not taken.intersection(over)", "", _PLACED + "test_every_decision_is_legal"),
        (
            "meshes: the last operand decides",
            "bool(over) and axis not in owner and not",
            "bool(over) and not",
            _PLACED + "test_decisions",
        ),
        (
            "meshes: no sums over devices",
            "if axis not in own for a in over))",
            "if axis in own for a in over))",
            _PLACED + "test_decisions",
        ),
        (
            "meshes: dims of size 1 are their axis",
            '(f"one{i}x{j}",) if size == 1 else',
            "names if size == 1 else",
            _PLACED + "test_decisions",
        ),
        ("meshes: heads of the first axis alone", "if sizes.get(name, 1) > 1)", "if name)", _PLACED + "test_decisions"),
        (
            "meshes: an operand's mesh first",
            "if context.empty else context",
            "if own else context",
            _PLACED + "test_the_mesh_of_a_call",
        ),
        ("meshes: empty meshes count", "if not a.sharding.mesh.empty)", "if a.sharding)", _PLACED + "test_the_mesh_of_a_call"),
    ),
    *_mutants(
        "core/mesh/sharded.py",
        (
            "meshes: any axis may be split",
            "if not all(name in dims for dims in heads[len(ins) :]) or not any",
            "if not any",
            "tests/core/test_sharded.py::test_malformed_rules",
        ),
        (
            "meshes: settings of who compiles",
            "with jax_compat.with_settings(self.settings):",
            "with jax_compat.with_settings(()):",
            "tests/core/test_sharded.py::test_settings_are_those_of_the_call",
        ),
    ),
    # --------------------------------------------------------------------------------------------------------------- layers
    *_mutants(
        "_layers.py",
        (
            "layers: norms of any axis",
            "if not (_last(layer.reduction_axes, ndim) and _last(layer.feature_axes, ndim)):",
            "if not _last(layer.reduction_axes, ndim):",
            _SERVED + "test_norms",
        ),
        ("layers: masked norms", "if mask is not None:", "if mask is False:", _SERVED + "test_norms"),
        (
            "layers: norms that round twice",
            "return op(x, *map(wide, parameters), epsilon=epsilon).astype(dtype)",
            "return op(x.astype(dtype), *map(wide, parameters), epsilon=epsilon).astype(dtype)",
            _SERVED + "test_norms_round_once",
        ),
        (
            "layers: summed axes in any order",
            "and lhs_summed == tuple(range(lhs.ndim - c, lhs.ndim))",
            "and set(lhs_summed) == set(range(lhs.ndim - c, lhs.ndim))",
            _SERVED + "test_products",
        ),
        (
            "layers: batch axes of one operand",
            "and lhs_batch == rhs_batch == tuple(range(b))",
            "and lhs_batch == tuple(range(b))",
            _SERVED + "test_products",
        ),
        (
            "layers: a bias of another dtype",
            "bias is not None and bias.dtype == x.dtype and",
            "bias is not None and",
            _SERVED + "test_a_bias_of_another_dtype_is_added_after",
        ),
        (
            "layers: a precision for each operand",
            "if not (precision is None or isinstance(precision, str | lax.Precision)):",
            "if False:",
            _SERVED + "test_dtypes_and_precisions_of_products",
        ),
        (
            "layers: active dropout",
            '> 0.0 and not options.get("deterministic", False)',
            '> 1.0 and not options.get("deterministic", False)',
            _SERVED + "test_attention",
        ),
        (
            "layers: large heads",
            ' if name == "bias")) or attention_limits(q, k, v)',
            ' if name == "bias"))',
            _SERVED + "test_attention",
        ),
        (
            "layers: causal masks top-left",
            "jnp.tril(jnp.ones((s, t), bool), t - s)",
            "jnp.tril(jnp.ones((s, t), bool))",
            _SERVED + "test_causal_attention_is_bottom_right",
        ),
        (
            "layers: causal ops top-left",
            '"bottom_right" if causal else',
            "True if causal else",
            _SERVED + "test_causal_attention_is_bottom_right",
        ),
        (
            "layers: a mask replaces causality",
            "return causal if mask is None else jnp.logical_and(mask, causal)",
            "return causal if mask is None else mask",
            _SERVED + "test_causal_attention_is_bottom_right",
        ),
    ),
]


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The changed file's text; ValueError where `old` does not stand in it exactly once."""
    text = (root / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has {count} times, where it must have once: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def lacking(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Those of its tests that there are not; parameters are not looked at."""
    found = []
    for test in mutant.tests:
        path, _, name = test.partition("::")
        file = root / path
        tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if name.partition("[")[0] not in names:
            found.append(test)
    return found


def _snapshot(directory: Path) -> Path:
    """The checkout as it is now: what is edited meanwhile changes no verdict."""
    for name in COPIED:
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            directory.mkdir(exist_ok=True)
            shutil.copy(source, directory / name)
    return directory


def _run(directory: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """pytest's exit status and its output, with the copy's own library. Copies share compiled kernels: their key is the content."""
    environment = os.environ | {
        "PYTHONPATH": str(directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_CACHE_DIR": str(directory.parent / "triton"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:benchmark", "-p", "no:cacheprovider", *options, *tests]
    try:
        run = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 1, f"no end in {SECONDS} s"
    return run.returncode, run.stdout + run.stderr


def judged(mutant: Mutant, plain: Path) -> str:
    """Why a mutant of the library in `plain` is not as it should be; "" where its tests noticed it."""
    directory = Path(tempfile.mkdtemp(dir=plain.parent))
    try:
        text = mutated(mutant, plain)
        shutil.copytree(plain, directory, dirs_exist_ok=True)
        (directory / mutant.file).write_text(text)
        status, said = _run(directory, mutant.tests, "-x")
    except ValueError as error:
        return str(error)
    finally:
        shutil.rmtree(directory)
    if status == 1:
        return ""
    return "survives" if status == 0 else f"pytest ended with {status}: {' '.join(said.split()[-40:])}"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Change the library; some test must notice.")
    parser.add_argument("names", nargs="*", help="words, of which a mutant's name must contain one")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="how many mutants at once")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if not asked.names or any(word in m.name for word in asked.names)]
    if not chosen:
        parser.error(f"no mutant is called so; there are: {', '.join(m.name for m in MUTANTS)}")
    tests = list(dict.fromkeys(test for m in chosen for test in m.tests))
    with tempfile.TemporaryDirectory(prefix="jtops-mutants-") as scratch:
        print(f"{len(tests)} tests without any mutant ...", flush=True)
        plain = _snapshot(Path(scratch) / "plain")
        status, said = _run(plain, tests)
        if status != 0:
            print(f"{said}\nThey must pass before they can judge.")
            return 1
        verdicts = {}
        with ThreadPoolExecutor(asked.workers) as pool:
            runs = {pool.submit(judged, m, plain): m for m in chosen}
            for done in as_completed(runs):
                verdicts[runs[done]] = verdict = done.result()
                print(f"{len(verdicts)}/{len(chosen)} {runs[done].name}: {verdict or 'noticed'}", flush=True)
    wrong = [m for m in chosen if verdicts[m]]
    width = max(len(m.name) for m in chosen)
    print("\n" + "\n".join(f"{m.name:{width}}  {m.file.removeprefix('jtops/')}: {verdicts[m] or 'noticed'}" for m in chosen))
    print(f"\n{len(chosen) - len(wrong)} of {len(chosen)} mutants were noticed.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
