"""scripts/soak: random clients against a server of its own, and every second a look at it.

``command`` reads the arguments and picks a mode: ``chaos``, ``connections``, ``cancelled`` or
``bursts``. Each starts a server (``server``, on the models of a ``setup``), sends clients to it,
watches it (``monitor``) and fills in a ``report``.

``clients`` is the table of the clients' kinds: those that are ``staying``, ``leaving`` or to be
``refused``, and those that want a ``shaped`` answer, all on raw connections (``wire``) and with a
strict eye (``judge``, ``streams``). The ``town`` sends them.
"""
