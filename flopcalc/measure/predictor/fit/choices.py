"""Starting values, thresholds and weights of the fit that no measurement backs.

Each value is a choice. What was measured is in benchmarks/results, what was fitted in model_specs/predictors. To see
what a choice does, change it and run `python benchmarks/predict_error.py fit` and `report --predictor`.
"""

from __future__ import annotations

from flopcalc.base.vocabulary import HostPhase

# --- Search -----------------------------------------------------------------------------------------------------------
# A search starts with steps of 20 % to find its way over flat parts, then goes on with steps of 0.1 %.
SEARCH_STEPS = ((0.2, "3-point"), (1e-3, "2-point"))
SEARCH_ROUNDS = 100  # at most, of each
SEARCH_RANGE = 30.0  # no constant ends farther than this factor from where it started
ROUNDED_ERROR = 0.003  # relative errors below this count by their square, so that the sum of errors is smooth

# --- Products ---------------------------------------------------------------------------------------------------------
PRODUCTS_STRIDE = 3  # the search looks at every third product, sorted by total time
PRODUCTS_PULL = 0.01  # how strongly a constant stays at its start if no product determines it
# The search starts a little below the fastest product of all: what a constant allows beyond that would not be seen.
START_RATE_SHARE = 0.95
START_BANDWIDTH_SHARE = 0.9
MAX_TILE_SHARE = 1.0  # smaller tiles are never faster than the largest
PROCESSORS_RANGE = 2  # the count of processors is searched from half of its start to twice as many
PROCESSORS_GAIN = 0.05  # another count must lower the sum of errors by this share
PROCESSORS_ROUNDS = 3  # of the search for their count, each followed by one for the other constants
SINGLE_CALL_WEIGHT = 4  # a product that was timed alone counts as this many calls of a step
MIN_UNALIGNED_SIZE = 2**31  # m * n * k from which a product shows what unaligned widths cost

# Products of experts.
MIN_ROWS_PER_EXPERT = 8  # an untrained router leaves many experts without rows in smaller steps
MIN_GROUPED_CALLS = 8  # six constants per direction need at least this many calls
GROUPED_ROUNDED_ERROR = 0.02
GROUPED_PULL = 0.05  # how strongly a constant stays at its start if no call determines it
GROUPED_BANDWIDTH_SHARE = 0.8  # of plain products' bandwidth, where no expert was measured

# --- Attention --------------------------------------------------------------------------------------------------------
MIN_ATTENTION_SIZES = 5  # four constants need at least this many different calls
MIN_HEADS_RANGE = 2  # between the fewest and the most heads of these calls
MIN_KEYS_RANGE = 4
MAX_SHORTEST_CALL = 4  # times the shortest call of all: a kernel without short calls does not determine its start
# What one query and one key of the longest row take, in pairs, for kernels whose calls do not determine it: one
# processor of about 130 takes 128 queries, and half of the others are busy at the same time.
PAIRS_PER_QUERY = {"forward": 130.0, "backward": 380.0}
PAIRS_PER_QUERY_IN_WAVES = 50.0  # where pairs are counted in whole waves of blocks
PAIRS_PER_LONGEST_KEY = 7500.0
ATTENTION_START_SHARE = 0.9  # of the shortest call: the start of kernels whose calls do not determine it

# --- Memory-bound operators -------------------------------------------------------------------------------------------
BINS_PER_OCTAVE = 2
MIN_CURVE_POINTS = 3

# --- Clock ------------------------------------------------------------------------------------------------------------
START_GAPS_S = {"train": 2e-6, "forward": 1e-6}  # between two kernels
START_POWER = (0.2, 0.7)  # share of the peak at which the clock falls, and how steeply
NO_POWER_LIMIT = (1.0, 0.01)  # where no step shows the clock
MAX_SPREAD = 0.1  # steps that repeat worse are left out
MIN_BUSY_SHARE = 0.93  # of a profiled step, for the device to bound it
MAX_HOST_SHARE = 0.6  # of the device's time, for the device to bound a step without a profile
MAX_OPTIMIZER_SHARE = 0.2  # of the device's time: with longer rests the clock changes within a step
MIN_LARGE_PRODUCT_S = 5e-5  # products that FLOPs bound, not bytes
MIN_RATE = 0.1  # share of the peak below which a step says nothing about the clock
MIN_SLOWDOWN_STEPS = 8
SLOWDOWN_STARTS = tuple(percent / 100 for percent in range(10, 70))  # shares of the peak that are tried

# --- Watts ------------------------------------------------------------------------------------------------------------
START_WATTS = (0.1, 1.5, 0.9)  # in shares of the limit: while kernels run, at the peak, at the bandwidth
WATTS_ROUNDED_ERROR = 0.05  # joules of 0.7 s repeat within about this
MIN_WATTS_ROWS = 12  # three coefficients need at least this many steps and calls

# --- Host -------------------------------------------------------------------------------------------------------------
HOST_PHASES: tuple[HostPhase, ...] = ("train", "forward", "decode")
# Host time of operators that cannot be called alone, in additions: a module's own Python, autograd's nodes,
# gradients of attention and of indexed sums (many kernels). The others are used where a calibration has not measured
# them; an optimizer's tensors are those of benchmarks/results/host_tensors.json.
HOST_UNITS = {
    "view": 0.4, "make": 0.6, "product": 2.2, "product_grouped": 2.5, "attention": 3.5, "sort": 4.0,
    "attention_backward": 6.0, "scatter_backward": 8.0, "module": 1.0, "node": 0.3, "tensor": 0.37,
    "cleared": 0.09,
}  # fmt: skip
MAX_DEVICE_SHARE = 0.5  # of the host's time: beyond it a step says little about the host
PACE_ROUNDS = 3  # of the search for a host's pace: a step that also waits is not in proportion to it
# How strongly a model type's call and its operators' factor are drawn to the usual. Steps repeat within 5 %; calls of
# model types differ by a third of the smallest step, operators by an eighth.
PULLS = (0.15, 0.4)
CALL_STEP_S, FACTOR_STEP = 1e-3, 0.5  # changes that show how a step's time depends on the two

# --- Interval ---------------------------------------------------------------------------------------------------------
# Relative half widths. Chosen from calibrations in which each model was left out in turn.
INTERVAL = {"device": 0.035, "host": 0.08, "late": 0.02, "compiled": 0.1}
