#!/bin/sh
# Makes the secrets of a pool: `make-secrets.sh [HOST[:PORT]]`. Without HOST, the database is that of postgresql.yaml.
#
# Passwords are random, and are written nowhere but into the cluster. For a server of your own, DBPASSWORD in the
# environment has the password of its user `ringmaster`. Existing secrets are not replaced: the command then fails.
set -eu
host=${1:-postgresql:5432}
database=${DBPASSWORD:-$(openssl rand -hex 24)}
password=$(openssl rand -hex 24)
case $database in
*[!A-Za-z0-9._~-]*)
    echo "DBPASSWORD has characters that mean something in a URL. To fix: choose one of letters, digits and '._~-'" >&2
    exit 2
    ;;
esac

umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
create() { kubectl --namespace ringmaster create secret generic "$@"; }

# Every pod of the pool has these.
cat >"$folder/pool.env" <<END
RINGMASTER_DATABASE=postgresql://ringmaster:$database@$host/ringmaster
PREFECT_API_AUTH_STRING=ringmaster:$password
MLFLOW_TRACKING_PASSWORD=$password
END
create ringmaster-pool --from-env-file="$folder/pool.env"

# The servers alone have these.
cat >"$folder/servers.env" <<END
POSTGRES_PASSWORD=$database
PREFECT_API_DATABASE_CONNECTION_URL=postgresql+asyncpg://ringmaster:$database@$host/ringmaster_prefect
PREFECT_SERVER_API_AUTH_STRING=ringmaster:$password
MLFLOW_BACKEND_STORE_URI=postgresql+psycopg://ringmaster:$database@$host/ringmaster_mlflow
MLFLOW_FLASK_SERVER_SECRET_KEY=$(openssl rand -hex 32)
END
create ringmaster-servers --from-env-file="$folder/servers.env"

# MLflow reads these from a file.
cat >"$folder/mlflow-auth.ini" <<END
[mlflow]
default_permission = READ
database_uri = postgresql+psycopg://ringmaster:$database@$host/ringmaster_mlflow_users
admin_username = ringmaster
admin_password = $password
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 60
END
create ringmaster-mlflow --from-file="$folder/mlflow-auth.ini"
