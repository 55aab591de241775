"""scripts/bench: streaming load on OpenAI-compatible servers, side by side, and what it shows.

``command`` reads the arguments into contestants and a ``workload``. A contestant is a server behind
a URL (``contestants``, asked through ``stream``) or the bare step loop of our engine (``bare``, in
a process of its own); those that are started here live and end by ``process``. ``rounds`` lets them
take turns until the ``figures`` are narrow enough; ``report`` and ``plot`` write them down.
"""
