BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0019');
CREATE TABLE commits (
	job VARCHAR(64) NOT NULL, 
	timeline INTEGER NOT NULL, 
	step BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	rounds_json TEXT NOT NULL, 
	loss FLOAT, 
	norm FLOAT NOT NULL, 
	scale FLOAT NOT NULL, 
	learning_rate FLOAT NOT NULL, 
	skip BOOLEAN NOT NULL, 
	tokens BIGINT NOT NULL, 
	committed_unix_s FLOAT NOT NULL, 
	PRIMARY KEY (job, timeline, step), 
	FOREIGN KEY(job) REFERENCES jobs (id)
);
CREATE TABLE control (
	id INTEGER NOT NULL, 
	epoch BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "control" VALUES(1,1);
CREATE TABLE data_folder (
	id TEXT NOT NULL, 
	place TEXT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE drains (
	peer TEXT NOT NULL, 
	incarnation BIGINT NOT NULL, 
	reason TEXT NOT NULL, 
	PRIMARY KEY (peer)
);
CREATE TABLE evaluations (
	job VARCHAR(64) NOT NULL, 
	timeline INTEGER NOT NULL, 
	version BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	loss FLOAT, 
	tokens BIGINT NOT NULL, 
	evaluated_unix_s FLOAT NOT NULL, 
	PRIMARY KEY (job, timeline, version), 
	FOREIGN KEY(job) REFERENCES jobs (id)
);
CREATE TABLE forks (
	job VARCHAR(40) NOT NULL, 
	timeline INTEGER NOT NULL, 
	origin INTEGER NOT NULL, 
	version BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	PRIMARY KEY (job, timeline)
);
CREATE TABLE jobs (
	id VARCHAR(64) NOT NULL, 
	name VARCHAR(40) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	error_code VARCHAR(8) NOT NULL, 
	hint TEXT NOT NULL, 
	since_unix_s FLOAT NOT NULL, 
	created_unix_s FLOAT NOT NULL, 
	spec_json TEXT NOT NULL, 
	tokens_json TEXT NOT NULL, 
	timeline INTEGER NOT NULL, 
	weights_sha256 VARCHAR(64) NOT NULL, files_json TEXT DEFAULT '[]' NOT NULL, first_steps_json TEXT DEFAULT '[0]' NOT NULL, start_where TEXT DEFAULT '' NOT NULL, start_name TEXT DEFAULT '' NOT NULL, peers_json TEXT DEFAULT '{}' NOT NULL, owner TEXT DEFAULT '' NOT NULL, times_json TEXT DEFAULT '{}' NOT NULL, peer_s FLOAT DEFAULT '0' NOT NULL, counted_unix_s FLOAT DEFAULT '0' NOT NULL, repeats_json TEXT DEFAULT '{}' NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "jobs" VALUES('rig-f19fe7','rig','cancelled','cancelled by its user','','',1700000000.0,1700000000.0,'{"schema_version":1,"name":"rig","model":{"id":"","revision":"main","family":"llama","config":{"bos_token_id":256,"eos_token_id":256,"hidden_size":32,"num_attention_heads":4,"initializer_range":0.02,"tie_word_embeddings":false,"intermediate_size":64,"hidden_act":"silu","rms_norm_eps":1e-6,"rope_theta":10000.0,"attention_dropout":0.0,"attention_bias":false,"mlp_bias":false,"num_hidden_layers":2,"num_key_value_heads":2,"vocab_size":257,"max_position_embeddings":2048,"head_dim":8},"init":"random","dtype":"float32","recompute":false,"compile":false,"tokenizer":""},"data":{"source":"/data/text.txt","format":"auto","text_field":"text","on_null":"fail","subset":"","split":"train","bin_dtype":"uint16","sequence_length":16,"packing":true,"shuffle":true,"validation_ratio":0.0,"upload_shard_bytes":67108864},"training":{"steps":4,"global_batch_sequences":12,"microbatch_sequences":2,"optimizer":"adamw","learning_rate":0.01,"betas":[0.9,0.95],"eps":1e-8,"lookahead":0.3,"momentum":0.0,"muon_products":"fast","weight_decay":0.1,"schedule":"cosine","warmup_steps":1,"min_lr_ratio":0.1,"grad_clip_norm":1.0,"seed":0,"eval_every_steps":0,"reproducible":true,"fixed_point_bits":24},"pipeline":{"stages":2,"split":[1,1],"routing":"least_completion","max_in_flight":"auto","compression":"none","overlap":2,"sync_steps":1,"deadline_k":6.0,"deadline_min_s":1.0,"deadline_max_s":120.0,"rebalance":true,"rebalance_interval_s":30.0,"rebalance_min_gain":0.15,"rebalance_cooldown_s":120.0},"islands":{"count":1,"min":1,"shares":"equal"},"averaging":{"mode":"allreduce","aggregate":"mean","compression":"none","timeout_s":60.0},"outer":{"every_steps":"auto","learning_rate":"auto","momentum":"auto","fragments":"auto","overlap_steps":"auto","mixing":"auto","compression":"auto","buffer":"auto"},"checkpoint":{"dir":"","every_steps":500,"every_s":1800.0,"keep_last":3,"keep_every_steps":0,"optimizer":true,"resume_from":""},"limits":{"priority":0,"min_replicas":1,"max_replicas":0,"no_progress_s":300.0,"max_runtime_s":0.0,"on_stall":"wait","on_nonfinite":"skip","nonfinite_steps_max":10},"trust":{"spot_check":0.0,"newcomer_hops":0,"norm_band":false,"recount":0.0,"second_hash":false,"second_owner":0.0,"inviter_quota":false}}','{"shards": ["99e949ef493f3149b90aea5c82eab78c7b984f89d5f9bc288273faf189379855"], "token_dtype": "uint16", "vocabulary_size": 257, "unigram_entropy": 3.070863741234981, "end_of_text": 256}',0,'','[]','[0]','','','{}','submitter/ada','{"queued": 0.0}',0.0,1700000000.0,'{"microbatches": 0, "steps": 0, "reached": 0, "told": ""}');
INSERT INTO "jobs" VALUES('rig-6aff95','rig','queued','waits for peers','','',1700000000.0,1700000000.0,'{"schema_version":1,"name":"rig","model":{"id":"","revision":"main","family":"llama","config":{"bos_token_id":256,"eos_token_id":256,"hidden_size":32,"num_attention_heads":4,"initializer_range":0.02,"tie_word_embeddings":false,"intermediate_size":64,"hidden_act":"silu","rms_norm_eps":1e-6,"rope_theta":10000.0,"attention_dropout":0.0,"attention_bias":false,"mlp_bias":false,"num_hidden_layers":2,"num_key_value_heads":2,"vocab_size":257,"max_position_embeddings":2048,"head_dim":8},"init":"random","dtype":"float32","recompute":false,"compile":false,"tokenizer":""},"data":{"source":"/data/text.txt","format":"auto","text_field":"text","on_null":"fail","subset":"","split":"train","bin_dtype":"uint16","sequence_length":16,"packing":true,"shuffle":true,"validation_ratio":0.0,"upload_shard_bytes":67108864},"training":{"steps":4,"global_batch_sequences":12,"microbatch_sequences":2,"optimizer":"adamw","learning_rate":0.01,"betas":[0.9,0.95],"eps":1e-8,"lookahead":0.3,"momentum":0.0,"muon_products":"fast","weight_decay":0.1,"schedule":"cosine","warmup_steps":1,"min_lr_ratio":0.1,"grad_clip_norm":1.0,"seed":0,"eval_every_steps":0,"reproducible":true,"fixed_point_bits":24},"pipeline":{"stages":2,"split":[1,1],"routing":"least_completion","max_in_flight":"auto","compression":"none","overlap":2,"sync_steps":1,"deadline_k":6.0,"deadline_min_s":1.0,"deadline_max_s":120.0,"rebalance":true,"rebalance_interval_s":30.0,"rebalance_min_gain":0.15,"rebalance_cooldown_s":120.0},"islands":{"count":1,"min":1,"shares":"equal"},"averaging":{"mode":"allreduce","aggregate":"mean","compression":"none","timeout_s":60.0},"outer":{"every_steps":"auto","learning_rate":"auto","momentum":"auto","fragments":"auto","overlap_steps":"auto","mixing":"auto","compression":"auto","buffer":"auto"},"checkpoint":{"dir":"","every_steps":500,"every_s":1800.0,"keep_last":3,"keep_every_steps":0,"optimizer":true,"resume_from":""},"limits":{"priority":0,"min_replicas":1,"max_replicas":0,"no_progress_s":300.0,"max_runtime_s":0.0,"on_stall":"wait","on_nonfinite":"skip","nonfinite_steps_max":10},"trust":{"spot_check":0.0,"newcomer_hops":0,"norm_band":false,"recount":0.0,"second_hash":false,"second_owner":0.0,"inviter_quota":false}}','{"shards": ["99e949ef493f3149b90aea5c82eab78c7b984f89d5f9bc288273faf189379855"], "token_dtype": "uint16", "vocabulary_size": 257, "unigram_entropy": 3.070863741234981, "end_of_text": 256}',0,'','[]','[0]','','','{}','submitter/ada','{}',0.0,0.0,'{"microbatches": 0, "steps": 0, "reached": 0, "told": ""}');
INSERT INTO "jobs" VALUES('rig-3c492a','rig','queued','waits for peers','','',1700000000.0,1700000000.0,'{"schema_version":1,"name":"rig","model":{"id":"","revision":"main","family":"llama","config":{"bos_token_id":256,"eos_token_id":256,"hidden_size":32,"num_attention_heads":4,"initializer_range":0.02,"tie_word_embeddings":false,"intermediate_size":64,"hidden_act":"silu","rms_norm_eps":1e-6,"rope_theta":10000.0,"attention_dropout":0.0,"attention_bias":false,"mlp_bias":false,"num_hidden_layers":2,"num_key_value_heads":2,"vocab_size":257,"max_position_embeddings":2048,"head_dim":8},"init":"random","dtype":"float32","recompute":false,"compile":false,"tokenizer":""},"data":{"source":"/data/text.txt","format":"auto","text_field":"text","on_null":"fail","subset":"","split":"train","bin_dtype":"uint16","sequence_length":16,"packing":true,"shuffle":true,"validation_ratio":0.0,"upload_shard_bytes":67108864},"training":{"steps":4,"global_batch_sequences":12,"microbatch_sequences":2,"optimizer":"adamw","learning_rate":0.01,"betas":[0.9,0.95],"eps":1e-8,"lookahead":0.3,"momentum":0.0,"muon_products":"fast","weight_decay":0.1,"schedule":"cosine","warmup_steps":1,"min_lr_ratio":0.1,"grad_clip_norm":1.0,"seed":0,"eval_every_steps":0,"reproducible":true,"fixed_point_bits":24},"pipeline":{"stages":2,"split":[1,1],"routing":"least_completion","max_in_flight":"auto","compression":"none","overlap":2,"sync_steps":1,"deadline_k":6.0,"deadline_min_s":1.0,"deadline_max_s":120.0,"rebalance":true,"rebalance_interval_s":30.0,"rebalance_min_gain":0.15,"rebalance_cooldown_s":120.0},"islands":{"count":1,"min":1,"shares":"equal"},"averaging":{"mode":"allreduce","aggregate":"mean","compression":"none","timeout_s":60.0},"outer":{"every_steps":"auto","learning_rate":"auto","momentum":"auto","fragments":"auto","overlap_steps":"auto","mixing":"auto","compression":"auto","buffer":"auto"},"checkpoint":{"dir":"","every_steps":500,"every_s":1800.0,"keep_last":3,"keep_every_steps":0,"optimizer":true,"resume_from":""},"limits":{"priority":0,"min_replicas":1,"max_replicas":0,"no_progress_s":300.0,"max_runtime_s":0.0,"on_stall":"wait","on_nonfinite":"skip","nonfinite_steps_max":10},"trust":{"spot_check":0.0,"newcomer_hops":0,"norm_band":false,"recount":0.0,"second_hash":false,"second_owner":0.0,"inviter_quota":false}}','{"shards": ["99e949ef493f3149b90aea5c82eab78c7b984f89d5f9bc288273faf189379855"], "token_dtype": "uint16", "vocabulary_size": 257, "unigram_entropy": 3.070863741234981, "end_of_text": 256}',0,'','[]','[0]','','','{}','submitter/bob','{}',0.0,0.0,'{"microbatches": 0, "steps": 0, "reached": 0, "told": ""}');
CREATE TABLE members (
	role VARCHAR(20) NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	keys_json TEXT NOT NULL, 
	invited_by TEXT NOT NULL, 
	revoked_unix_s FLOAT NOT NULL, 
	reason TEXT NOT NULL, 
	PRIMARY KEY (role, name)
);
INSERT INTO "members" VALUES('submitter','bob','{"abababababababababababababababababababababababababababababababab": 2000000000.0}','swarm://x/admin/local',0.0,'');
CREATE TABLE quarantine (
	peer TEXT NOT NULL, 
	since_unix_s FLOAT NOT NULL, 
	strikes_json TEXT NOT NULL, 
	PRIMARY KEY (peer)
);
CREATE TABLE removals (
	job VARCHAR(40) NOT NULL, 
	checkpoint_dir TEXT NOT NULL, 
	PRIMARY KEY (job)
);
CREATE TABLE shares (
	job VARCHAR(40) NOT NULL, 
	timeline INTEGER NOT NULL, 
	version BIGINT NOT NULL, 
	shares_json TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	PRIMARY KEY (job, timeline, version)
);
CREATE TABLE tokens (
	id VARCHAR(8) NOT NULL, 
	secret_hash TEXT NOT NULL, 
	role TEXT NOT NULL, 
	names TEXT NOT NULL, 
	uses_left INTEGER NOT NULL, 
	expires_unix_s FLOAT NOT NULL, 
	created_by TEXT NOT NULL, 
	created_unix_s FLOAT NOT NULL, 
	joined_json TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "tokens" VALUES('t1','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd','viewer','*',1,2000000000.0,'swarm://x/admin/local',1700000000.0,'{}');
CREATE INDEX ix_jobs_name ON jobs (name);
COMMIT;
