"""A web application that signs up users, and the worker process that mails them. On PostgreSQL or SQLite.

Install workq with the driver and the extra `dev` (or fastapi, uvicorn and sqlalchemy[asyncio]). Then in examples/:

    export DATABASE_URL=sqlite+aiosqlite:///signup.db  # or postgresql+asyncpg://user:password@host/name
    python -m signup.schema
    python -m signup.worker
    uvicorn --factory signup.app:main
"""
