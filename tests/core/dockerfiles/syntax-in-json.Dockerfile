{"syntax": "evil/frontend:1"}
