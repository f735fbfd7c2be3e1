"""The offload runtime: transfers of a planned graph, and demand paging for code that no graph covers."""
