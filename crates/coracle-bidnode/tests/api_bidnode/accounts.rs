//! Service accounts of a real API server as clients of the market: each trades for its own namespace, the operator for all.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use coracle_market::{AUDIENCE, Account, Accounts, Answer, Review, Unreviewed};
use coracle_proto::market::{
    self as pb, admin_client::AdminClient, market_client::MarketClient, trading_client::TradingClient,
};
use coracle_testkit::{cluster, eventually};
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::ServiceAccount,
    rbac::v1::{Role, RoleBinding},
};
use kube::{Api, Client, api::PostParams};
use serde_json::json;
use tonic::{Code, Request, transport::Endpoint};

use crate::world::{ADMIN, CLUSTER, HERE, Operator, World, serve};

struct Asks(Client);

impl std::fmt::Debug for Asks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asks")
    }
}

impl Review for Asks {
    fn review<'a>(&'a self, token: &'a str) -> Answer<'a> {
        Box::pin(async move {
            let user = coracle_access::review_token(&self.0, token, Some(AUDIENCE)).await;
            let user = user.map_err(|e| Unreviewed(e.into()))?;
            let Some(user) = user else { return Ok(None) };
            let Some(account) = user.username.as_deref().and_then(Account::of_user) else { return Ok(None) };
            let access = coracle_bidnode::trade_access(&account.namespace);
            let allowed = coracle_access::review_access(&self.0, user, access).await;
            Ok(Some(Account { may_trade: allowed.map_err(|e| Unreviewed(e.into()))?, ..account }))
        })
    }
}

/// Returns a token of a service account, which is created if it does not exist.
async fn token(client: &Client, ns: &str, name: &str, audience: &str) -> anyhow::Result<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), ns);
    if accounts.get_opt(name).await?.is_none() {
        let account = ServiceAccount {
            metadata: kube::core::ObjectMeta { name: Some(name.into()), ..Default::default() },
            ..ServiceAccount::default()
        };
        accounts.create(&PostParams::default(), &account).await?;
    }
    let spec = TokenRequestSpec { audiences: Some(vec![audience.into()]), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let made = accounts.create_token_request(name, &PostParams::default(), &request).await?;
    made.status.and_then(|status| status.token).context("a token")
}

/// Permits a group to create BidNodes in a namespace.
async fn allow(client: &Client, ns: &str, group: &str) -> anyhow::Result<()> {
    let meta = json!({"name": "trader"});
    let role = json!({"metadata": meta, "rules": [
        {"apiGroups": ["kubebid.io"], "resources": ["bidnodes"], "verbs": ["create"]},
    ]});
    let binding = json!({
        "metadata": meta,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "trader"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}],
    });
    let roles: Api<Role> = Api::namespaced(client.clone(), ns);
    roles.create(&PostParams::default(), &serde_json::from_value(role)?).await?;
    let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), ns);
    bindings.create(&PostParams::default(), &serde_json::from_value(binding)?).await?;
    Ok(())
}

fn request_as<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

#[test]
fn service_accounts_trade_for_namespace_operator_for_all() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let dir = tempfile::tempdir()?;
        let accounts = Accounts {
            review: Arc::new(Asks(w.client.clone())),
            cluster: CLUSTER.into(),
            operator: format!("{}/operator", w.ns),
        };
        let any: SocketAddr = ([127, 0, 0, 1], 0).into();
        let clock = coracle_types::Clock::system();
        let market = serve(&dir.path().join("market.db"), any, clock, Some(accounts)).await?;
        let url = format!("http://{}", market.grpc);
        let channel = Endpoint::from_shared(url.clone())?.connect().await?;
        let mut admin = AdminClient::new(channel.clone());
        let put = || pb::PutMarketRequest {
            market: HERE.into(),
            reserve_micros: 2_000_000,
            cap_micros: 8_000_000,
            ..pb::PutMarketRequest::default()
        };
        admin.put_market(request_as(ADMIN, put())).await?;
        let worker = token(&w.client, &w.ns, "worker", AUDIENCE).await?;
        let operator = token(&w.client, &w.ns, "operator", AUDIENCE).await?;
        let elsewhere = token(&w.client, &w.ns, "worker", "https://kubernetes.default.svc").await?;

        let bid = |tenant: &str| pb::PlaceBidRequest {
            market: HERE.into(),
            limit_micros: 2_000_000,
            quantity: 1,
            owner_uid: "o".into(),
            tenant: tenant.into(),
            ..pb::PlaceBidRequest::default()
        };
        let mut trading = TradingClient::new(channel.clone());
        let mut place = async |token: &str, tenant: &str| {
            trading.place_bid(request_as(token, bid(tenant))).await.map_or_else(|s| s.code(), |_| Code::Ok)
        };
        let own = format!("{CLUSTER}/{}", w.ns);
        assert_eq!(place(&worker, "").await, Code::PermissionDenied, "may not create BidNodes");
        allow(&w.client, &w.ns, &format!("system:serviceaccounts:{}", w.ns)).await?;
        // The review of the first account is cached for a while; RBAC changes reach the authorizer through its watch.
        let mut accounts = 0;
        let (worker, code) = eventually("the right holds", async || {
            accounts += 1;
            let other = token(&w.client, &w.ns, &format!("worker-{accounts}"), AUDIENCE).await.unwrap();
            let code = place(&other, "").await;
            (code != Code::PermissionDenied).then_some((other, code))
        })
        .await?;
        assert_eq!(code, Code::Ok);
        assert_eq!(
            place(&worker, &format!("{own}/x")).await,
            Code::PermissionDenied,
            "no tenant below its own"
        );
        assert_eq!(place(&worker, &own).await, Code::Ok, "the same tenant by name");
        assert_eq!(place(&worker, &format!("{CLUSTER}/other")).await, Code::PermissionDenied);
        assert_eq!(place(&operator, &format!("{CLUSTER}/other")).await, Code::Ok);
        assert_eq!(place(&elsewhere, "").await, Code::Unauthenticated, "made for another audience");
        assert_eq!(place("not.a.token", "").await, Code::Unauthenticated);
        assert_eq!(place(ADMIN, "").await, Code::Ok, "tokens of the market still work");
        let denied = admin.put_market(request_as(&operator, put())).await.unwrap_err();
        assert_eq!(denied.code(), Code::PermissionDenied, "service accounts cannot administer");
        let listed =
            MarketClient::new(channel).list_markets(request_as(&worker, pb::ListMarketsRequest {})).await?;
        assert_eq!(listed.into_inner().markets.len(), 1);

        // The operator itself, which reads its token from a file.
        let file = dir.path().join("token");
        std::fs::write(&file, format!("{operator}\n"))?;
        let mut config = w.config(World::times());
        (config.market.url, config.market.token, config.market.token_file) = (url, String::new(), Some(file));
        let operator = Operator::start(cluster.client(), config);
        w.create("by-file", |_| {}).await?;
        w.until("by-file", |s| s.pending_bids == Some(2)).await?;
        operator.stop().await?;
        market.end().await;
        anyhow::Ok(())
    });
}
