"""scripts/fuzz: hostile bodies for every POST route, and a strict eye on what comes back.

``command`` reads the arguments. ``shapes`` has a right body for each route and ``hostile`` the
values that do not belong into one; ``cases`` makes a request of them by its route, seed and number,
``judge`` says what is wrong with an answer, and ``run`` sends them all to a server. Connections,
the server and the report are those of ``soak_lib``.
"""
