"""The kinds of clients and how often each comes."""

from __future__ import annotations

from . import asking, leaving, refused, shaped, staying
from .town import Kind

LEAVING = (
    Kind(leaving.leave_before_headers, 8),
    Kind(leaving.leave_in_prefill, 5),
    Kind(leaving.leave_in_stream, 8),
    Kind(leaving.leave_before_done, 4),
    Kind(leaving.client_timeout, 4),
    Kind(leaving.half_close, 2),
    Kind(leaving.zero_window_that_leaves, 1),
)
"""Clients whose request is cancelled."""

KINDS = (
    *LEAVING,
    Kind(staying.stream_to_the_end, 10),
    Kind(staying.whole_to_the_end, 10),
    Kind(staying.long_prompt, 3),
    Kind(staying.fits_only_the_larger, 1),
    Kind(staying.slow_reader, 3),
    Kind(staying.late_reader, 2),
    Kind(staying.keep_alive, 4),
    Kind(staying.pipelining, 4),
    Kind(staying.burst, 1),
    Kind(leaving.zero_window, 1),
    Kind(leaving.say_nothing, 4),
    Kind(refused.over_long, 4),
    Kind(refused.huge_body, 2),
    Kind(refused.half_body, 2),
    Kind(staying.slow_body, 3),
    Kind(staying.expect_continue, 3),
    Kind(refused.malformed_body, 6),
    Kind(refused.malformed_http, 6),
    Kind(asking.control, 8),
    Kind(staying.one_answer_only, 3),
    Kind(shaped.fields_without_effect, 3),
    Kind(shaped.several_answers, 3),
    Kind(shaped.forced_call, 2),
    Kind(shaped.forced_form, 2),
    Kind(shaped.log_probabilities, 3),
    Kind(shaped.counting, 5),
    Kind(shaped.kept_response, 3),
    Kind(shaped.cancelled_response, 3),
)
