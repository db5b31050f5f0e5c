//! Tokens of tenants: administrators mint, list and revoke them.

use coracle_cli::cli::{TokenCommand, TokenListArgs, TokenMintArgs, TokenRevokeArgs};
use coracle_cli::error::Failure;
use coracle_proto::market as pb;
use coracle_proto::market::admin_client::AdminClient;
use serde_json::json;

use super::{Connection, Item, market_failure, show};

pub(super) async fn run(command: TokenCommand) -> Result<(), Failure> {
    match command {
        TokenCommand::Mint(args) => mint(args).await,
        TokenCommand::List(args) => list(args).await,
        TokenCommand::Revoke(args) => revoke(args).await,
    }
}

/// Mints a token for a tenant. The cap and the rate of the tenant stay unchanged.
async fn mint(args: TokenMintArgs) -> Result<(), Failure> {
    let connection = Connection::open(&args.at).await?;
    let scopes = args.scopes.iter().map(|scope| scope.as_str().to_owned()).collect::<Vec<_>>();
    let request =
        pb::PutTenantRequest { tenant: args.name.clone(), scopes: scopes.clone(), ..Default::default() };
    let mut client = AdminClient::new(connection.channel.clone());
    let token = client
        .put_tenant(connection.authorised_request(request)?)
        .await
        .map_err(market_failure)?
        .into_inner()
        .token;
    let item = Item {
        name: token.clone(),
        cells: vec![args.name.clone(), scopes.join(","), token.clone()],
        wide: Vec::new(),
        document: json!({"tenant": args.name, "scopes": scopes, "token": token}),
    };
    show(&args.at.output, "MintedToken", &["TENANT", "SCOPES", "TOKEN"], &[], vec![item])
}

async fn list(args: TokenListArgs) -> Result<(), Failure> {
    let connection = Connection::open(&args.at).await?;
    let mut client = AdminClient::new(connection.channel.clone());
    let request = pb::ListTokensRequest { tenant: args.name.unwrap_or_default() };
    let tokens = client
        .list_tokens(connection.authorised_request(request)?)
        .await
        .map_err(market_failure)?
        .into_inner()
        .tokens;
    let item = |t: &pb::Token| Item {
        name: t.id.clone(),
        cells: vec![t.id.clone(), t.tenant.clone(), t.scopes.join(",")],
        wide: Vec::new(),
        document: json!({"id": t.id, "tenant": t.tenant, "scopes": t.scopes}),
    };
    show(&args.at.output, "Token", &["ID", "TENANT", "SCOPES"], &[], tokens.iter().map(item).collect())
}

async fn revoke(args: TokenRevokeArgs) -> Result<(), Failure> {
    let connection = Connection::open(&args.at).await?;
    let mut client = AdminClient::new(connection.channel.clone());
    let request = pb::RevokeTokenRequest { id: args.id.clone() };
    client.revoke_token(connection.authorised_request(request)?).await.map_err(market_failure)?;
    let cells = vec![args.id.clone(), "revoked".to_owned()];
    let document = json!({"id": args.id, "state": "revoked"});
    let item = Item { name: args.id, cells, wide: Vec::new(), document };
    show(&args.at.output, "TokenState", &["ID", "STATE"], &[], vec![item])
}
