"""A web application that signs up users, and the worker process that mails them. On PostgreSQL or SQLite.

It needs workq with its driver, fastapi, uvicorn and sqlalchemy[asyncio]. In examples/, with this in every terminal:

    export DATABASE_URL=sqlite+aiosqlite:///signup.db  # or postgresql+asyncpg://user:password@host/name

make the tables once, then run the two processes, each as often as you like:

    python -m signup.schema
    python -m signup.worker
    uvicorn --factory signup.app:main
"""
